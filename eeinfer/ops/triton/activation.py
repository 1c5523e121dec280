"""Gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


@triton.jit
def _gated(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """A tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu":
        gate = tl.where(gate < 0, 0.0, gate)  # NaN stays
    else:  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * SIZE + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """As `eeinfer.ops.activation.gated`, rounded once, for [n, 2 f] in bfloat16, float16 or float32."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    name = "gelu_tanh" if activation in {"gelu_new", "gelu_pytorch_tanh"} else activation
    _gated[(rows, triton.cdiv(size, _TILE))](gate_up, out, SIZE=size, TILE=_TILE, ACTIVATION=name, num_warps=4)
    return out
