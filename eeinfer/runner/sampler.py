"""Picks tokens from logits: the argmax, or a draw from the tempered distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eeinfer.core.plan import Draw
from eeinfer.ops.norm import at_least_float32


def sample(logits: Tensor, draws: Sequence[Draw], argmax: Tensor | None = None) -> Tensor:
    """Token ids, int64 [n].

    A draw takes the argmax after adding Gumbel noise that depends on its own seed only (Gumbel-max). So a row's token
    depends on nothing but its logits and its draw, and rounding in the logits changes it as seldom as can be: inverting
    the cumulative distribution would hand the error of all tokens before to each token.

    Args:
        logits: [n, V].
        draws: one a row.
        argmax: [n], if it is known already.
    """
    tokens = logits.argmax(dim=-1) if argmax is None else argmax.clone()
    for row, draw in enumerate(draws):
        if draw.temperature > 0:
            tokens[row] = _draw(logits[row], draw)
    return tokens


def _draw(logits: Tensor, draw: Draw) -> Tensor:
    wide = at_least_float32(logits.dtype)
    info = torch.finfo(wide)
    # Shifting by the largest first keeps tiny temperatures from overflowing; both are clamped to what the type can
    # divide by, since 0 / 0 and -inf / inf would be NaN.
    shifted = logits.to(wide) - logits.max().to(wide)
    tempered = shifted / min(max(draw.temperature, info.tiny), info.max)
    generator = torch.Generator(logits.device).manual_seed(draw.seed)
    exponential = torch.empty_like(tempered).exponential_(generator=generator).clamp_min_(info.tiny)
    return (tempered - exponential.log()).argmax()
