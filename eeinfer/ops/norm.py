"""RMS and layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which norms, rotations and statistics are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm, x / sqrt(mean(x^2) + eps) * weight along the last dimension; float32 or wider inside, type of `x` out.

    Args:
        x: [..., d].
        weight: [d], or None for the parameter-free norm.
        eps: added to the mean square.
    """
    wide = at_least_float32(x.dtype)
    return F.rms_norm(x.to(wide), x.shape[-1:], None if weight is None else weight.to(wide), eps).to(x.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `hidden` and `delta` [n, d] each, rounded to their type, and its RMS norm; see `rms_norm`."""
    hidden = hidden + delta
    return hidden, rms_norm(hidden, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al. 2016), (x - mean) / sqrt(variance + eps) * weight + bias; types as in `rms_norm`.

    Args:
        x: [..., d].
        weight: [d], or None for the parameter-free norm.
        bias: [d], or None with the parameter-free norm.
        eps: added to the variance.
    """
    wide = at_least_float32(x.dtype)
    gain, shift = (None if part is None else part.to(wide) for part in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], gain, shift, eps).to(x.dtype)
