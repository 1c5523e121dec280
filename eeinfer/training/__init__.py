"""Tuning of exit heads; the backbone stays frozen."""
