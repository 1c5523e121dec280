"""The parts of a model that are not products with matrices, as functions: a backend has its own of each.

Torch's are the reference. `eeinfer.ops.triton.parts` has kernels in their places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eeinfer.ops.activation import gated
from eeinfer.ops.attention import paged_attention, rotate_and_store, store_layers
from eeinfer.ops.logit_stats import LogitStats, logit_stats
from eeinfer.ops.norm import add_rms_norm, rms_norm
from eeinfer.ops.token_batch import TokenBatch


class Attention(Protocol):
    """As `eeinfer.ops.attention.paged_attention`."""

    def __call__(
        self, q: Tensor, cache: Tensor, batch: TokenBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Attention of n queries, [n, heads * head_dim]."""


class RotateAndStore(Protocol):
    """As `eeinfer.ops.attention.rotate_and_store`."""

    def __call__(
        self,
        projected: Tensor,
        cache: Tensor,
        slots: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        gains: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        """Writes K and V, returns q, [n, heads, head_dim]."""


class Stats(Protocol):
    """As `eeinfer.ops.logit_stats.logit_stats`."""

    def __call__(self, logits: Tensor, *, second: bool, mean: bool) -> LogitStats:
        """Statistics of logits [n, V]."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One backend's functions, each with the meaning of torch's in `TORCH`."""

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor, str], Tensor]
    rotate_and_store: RotateAndStore
    attention: Attention
    store_layers: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    logit_stats: Stats


TORCH = Parts(rms_norm, add_rms_norm, gated, rotate_and_store, paged_attention, store_layers, logit_stats)
