"""Rotary position embedding (Su et al. 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eeinfer.ops.norm import at_least_float32


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/head_dim) for i < head_dim / 2. Float32 [head_dim / 2]."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))


def scale_linear(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Position interpolation: all angles divided by `factor`."""
    return frequencies / scaling["factor"]


def scale_llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / scaling["factor"]


SCALINGS = {"default": lambda frequencies, _: frequencies, "linear": scale_linear, "llama3": scale_llama3}
SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rotations(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, [n, 1, head_dim / 2] each, in float32 or wider, for `positions` [n]."""
    angles = positions.to(at_least_float32(dtype))[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) of x [..., n, heads, head_dim] by its angle; type of `x`."""
    cos, sin = rotation
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
