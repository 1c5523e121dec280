"""Activations of MLPs, by the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """The activation of the first half times the second: [n, 2 f] to [n, f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
