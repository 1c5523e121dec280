"""Picks tokens from logits: the argmax, or a draw from the tempered distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eeinfer.core.plan import Draw
from eeinfer.ops.norm import at_least_float32


def sample(logits: Tensor, draws: Sequence[Draw], argmax: Tensor | None = None) -> Tensor:
    """Token ids, int64 [n].

    A draw inverts the cumulative distribution at its own `uniform`, so a row's token depends on nothing but its
    logits and its draw.

    Args:
        logits: [n, V].
        draws: one a row.
        argmax: [n], if it is known already.
    """
    tokens = logits.argmax(dim=-1) if argmax is None else argmax.clone()
    warm = [i for i, draw in enumerate(draws) if draw.temperature > 0]
    if not warm:
        return tokens
    rows = torch.tensor(warm, device=logits.device)
    wide = at_least_float32(logits.dtype)
    temperatures = torch.tensor([draws[i].temperature for i in warm], dtype=torch.float64, device=logits.device)
    # Clamped to what the type can divide by: 0 / 0 and -inf / inf would be NaN.
    temperatures = temperatures.clamp(torch.finfo(wide).tiny, torch.finfo(wide).max).to(wide)
    uniforms = torch.tensor([draws[i].uniform for i in warm], dtype=wide, device=logits.device)
    chosen = logits[rows].to(wide)
    # Shifting by the largest first keeps tiny temperatures from overflowing.
    shifted = (chosen - chosen.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    cumulative = shifted.exp().cumsum(dim=-1)
    picked = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(1)
    # A uniform that rounds up to the total would point past the end; the last token with any probability is meant.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    tokens[rows] = torch.minimum(picked, last)
    return tokens
