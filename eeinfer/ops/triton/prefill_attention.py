"""Attention of a flat, ragged set of queries over the paged caches of their sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.triton.fold import contiguous_halves, fold, padded_head, tile


@triton.jit(do_not_specialize=["count", "table_stride", "window"])
def _attend_tile(
    q, k_cache, v_cache, tables, positions, owners, out, count, table_stride, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of the flat order, one head: their sequences one after the other."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    tokens = first + tl.arange(0, ROWS)
    real = tokens < count
    position = tl.load(positions + tokens, mask=real, other=-1).to(tl.int32)
    owner = tl.load(owners + tokens, mask=real, other=-1).to(tl.int32)
    dims = tl.arange(0, PADDED)
    at = (tokens.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + dims[None, :]
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + at, mask=inside, other=0.0)
    for sequence in range(tl.load(owners + first).to(tl.int32), tl.max(owner, axis=0) + 1):
        own = tl.where(owner == sequence, position, -1)
        start = 0
        if WINDOWED:
            earliest = tl.min(tl.where(owner == sequence, position, 2147483647), axis=0)
            start = tl.maximum(earliest + 1 - window, 0) // KEYS * KEYS
        _, total, acc = fold(
            queries, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, PADDED], tl.float32), k_cache, v_cache, tables + sequence * table_stride, start,
            tl.max(own, axis=0) + 1, own, head // (HEADS // KV_HEADS), scale, softcap, window,
            KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, KEYS, WINDOWED, CAPPED,
        )  # fmt: skip
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside & (own >= 0)[:, None])


def prefill_attention(q: Tensor, cache: Tensor, batch: TokenBatch, scale: float, softcap: float | None) -> Tensor:
    """Causal attention of ragged queries, each over all that its sequence has cached before it.

    The reference is `eeinfer.ops.attention.paged_attention`.

    Args:
        q: [n, heads, head_dim], contiguous; bfloat16, float16 or float32.
        cache: one layer's [2, num_blocks, block_size, kv_heads, head_dim], in the type of q, with the tokens' own K
            and V in it.
        batch: from `TokenBatch.ragged`.
        scale: factor on the scores.
        softcap: bound of the scores; None for none.

    Returns:
        [n, heads * head_dim].
    """
    count, heads, head_dim = q.shape
    k_cache, v_cache = contiguous_halves(cache)
    out, rows, window = torch.empty_like(q), tile(q.dtype, head_dim), batch.window
    assert batch.owners is not None, "queries of several tokens have owners"
    _attend_tile[(triton.cdiv(count, rows), heads)](
        *(q, k_cache, v_cache, batch.block_tables, batch.positions, batch.owners, out),
        *(count, batch.block_tables.stride(0), window or 0, scale, softcap or 1.0),
        HEADS=heads,
        KV_HEADS=cache.shape[3],
        HEAD_DIM=head_dim,
        PADDED=padded_head(head_dim),
        BLOCK_SIZE=cache.shape[2],
        ROWS=rows,
        KEYS=rows,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=4,
        num_stages=2,
    )
    return out.flatten(1)
