"""RMS norm, alone and with the addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 4096  # numbers in a row from which more warps share it


@triton.jit
def _rms_norm(
    x, delta, gain, total, out, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """One row, after `delta` is added to it and the sum written to `total` (ADD)."""
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    start = tl.program_id(0).to(tl.int64) * SIZE
    row = tl.load(x + start + at, mask=inside, other=0.0)
    wide = row.to(tl.float32)
    if ADD:
        summed = (wide + tl.load(delta + start + at, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + start + at, summed, mask=inside)
        wide = summed.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if GAIN:
        normed *= tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + at, normed.to(row.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `eeinfer.ops.norm.rms_norm`, for x [..., d] in bfloat16, float16 or float32 and weight [d] in any of them."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `eeinfer.ops.norm.add_rms_norm`; hidden and delta [n, d] in bfloat16, float16 or float32, weight [d]."""
    hidden, delta = hidden.contiguous(), delta.contiguous()
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    _launch(hidden, delta, weight, total, out, eps)
    return total, out


def _launch(
    x: Tensor, delta: Tensor | None, weight: Tensor | None, total: Tensor | None, out: Tensor, eps: float
) -> None:
    size = x.shape[-1]
    _rms_norm[(x.numel() // size,)](
        *(x, x if delta is None else delta, x if weight is None else weight, x if total is None else total, out, eps),
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        ADD=delta is not None,
        GAIN=weight is not None,
        num_warps=8 if size >= _WIDE else 4,
    )
