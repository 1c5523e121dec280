"""Rotary position embedding (Su et al. 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eeinfer.ops.norm import at_least_float32


class Rotary(NamedTuple):
    """How positions turn the heads of some layers.

    Attributes:
        frequencies: float32 [rotary_dim / 2], radians a position.
        factor: on cosine and sine, so that scores grow by its square.
    """

    frequencies: Tensor
    factor: float


def inverse_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """theta^(-2i/rotary_dim) for i < rotary_dim / 2. Float32 [rotary_dim / 2]."""
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))


def rotary(rotary_dim: int, theta: float, scaling: dict[str, Any]) -> Rotary:
    """Frequencies and factor of a kind of scaling.

    Args:
        rotary_dim: how many numbers of a head turn; even.
        theta: base of the frequencies.
        scaling: `rope_type` and all numbers of that kind, as `eeinfer.model.families.keys.rope` reads them.
    """
    plain = inverse_frequencies(rotary_dim, theta)
    match scaling["rope_type"]:
        case "linear":  # position interpolation (arXiv 2306.15595)
            return Rotary(plain / scaling["factor"], 1.0)
        case "llama3":
            return Rotary(_llama3(plain, scaling), 1.0)
        case "yarn":
            return Rotary(_yarn(plain, theta, scaling), scaling["attention_factor"])
        case "longrope":  # arXiv 2402.13753, within the context of the first training
            return Rotary(plain / torch.tensor(scaling["short_factor"]), scaling["attention_factor"])
        case _:  # default; dynamic, which changes nothing within the longest context
            return Rotary(plain, 1.0)


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return blend * plain + (1 - blend) * plain / scaling["factor"]


def _yarn(plain: Tensor, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071): frequencies that turn often in the original context are kept, slow ones divided."""
    original, half = scaling["original_max_position_embeddings"], len(plain)

    def index(turns: float) -> float:
        """Where a frequency turns so many times in the original context."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = index(scaling["beta_fast"]), index(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low or 0.001)
    divided = ramp.clamp(0, 1)
    return plain / scaling["factor"] * divided + plain * (1 - divided)


def rotations(positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, [n, 1, rotary_dim / 2] each, in float32 or wider, for `positions` [n]."""
    angles = positions.to(at_least_float32(dtype))[:, None] * rotary.frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return (cos, sin) if rotary.factor == 1.0 else (cos * rotary.factor, sin * rotary.factor)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[i], x[i + rotary_dim / 2]) of x [..., n, heads, head_dim] by its angle; type of `x`.

    Numbers of a head beyond rotary_dim stay as they are.
    """
    cos, sin = rotation
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], rotation), x[..., turned:]), dim=-1)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
