"""Tensors in, tensors out: the arithmetic that model, exits and runner are made of. Plain torch, any device."""
