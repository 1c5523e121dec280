"""The parts of a model as Triton kernels."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from eeinfer.ops.parts import Parts
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.triton.activation import gated
from eeinfer.ops.triton.decode_attention import decode_attention, split_size
from eeinfer.ops.triton.logit_stats import logit_stats
from eeinfer.ops.triton.norm import add_rms_norm, rms_norm
from eeinfer.ops.triton.placement import rotate_and_store, store_layers
from eeinfer.ops.triton.prefill_attention import prefill_attention


def triton_parts(max_position: int) -> Parts:
    """The kernels, for a model with this longest context; in bfloat16, float16 or float32, heads up to 256."""
    attention = partial(paged_attention, split=split_size(max_position))
    return Parts(rms_norm, add_rms_norm, gated, rotate_and_store, attention, store_layers, logit_stats)


def paged_attention(
    q: Tensor, cache: Tensor, batch: TokenBatch, scale: float, softcap: float | None = None, *, split: int
) -> Tensor:
    """As `eeinfer.ops.attention.paged_attention`; a decode splits its keys by `split`, see `decode_attention`."""
    if batch.queries is None:
        return decode_attention(q, cache, batch, scale, softcap, split)
    return prefill_attention(q, cache, batch, scale, softcap)
