"""Measures speed and quality: workloads, interleaved runs, metrics, reports."""
