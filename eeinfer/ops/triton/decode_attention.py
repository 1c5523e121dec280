"""Attention of one query a sequence over its paged cache, split along the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.triton.fold import contiguous_halves, fold, padded_head, tile

_MOST_SPLITS = 64  # of the longest context a model knows, which bounds the workspace
_SHORTEST_SPLIT = 256
_TOGETHER = 16  # splits that are merged at a time
_LEAST_ROWS = 16  # of a product


@triton.jit(do_not_specialize=["table_stride", "splits", "window"])
def _attend_split(
    q, k_cache, v_cache, tables, positions, out, sums, weights, table_stride, splits, window, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """One split of one row, for the query heads that share a KV head. ALONE: it is the only one."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    start = split * SPLIT
    stop = tl.minimum(start + SPLIT, position + 1)
    if WINDOWED:
        start = tl.maximum(start, tl.maximum(position + 1 - window, 0) // KEYS * KEYS)
    if not ALONE:  # noqa: SIM102 - the outer one is decided by the compiler
        if start >= stop:  # the merge does not read this split
            return
    members = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    heads = row * KV_HEADS * GROUP + kv_head * GROUP + members
    real = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + heads[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    largest, total, acc = fold(
        queries, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, PADDED], tl.float32), k_cache, v_cache, tables + row * table_stride, start, stop,
        tl.where(members < GROUP, position, -1), kv_head, scale, softcap, window,
        KV_HEADS, HEAD_DIM, PADDED, BLOCK_SIZE, KEYS, WINDOWED, CAPPED,
    )  # fmt: skip
    if ALONE:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + heads[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=real)
    else:
        part = heads * splits + split
        tl.store(sums + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
        tl.store(weights + part * 2, largest, mask=members < GROUP)
        tl.store(weights + part * 2 + 1, total, mask=members < GROUP)


@triton.jit(do_not_specialize=["splits", "window"])
def _merge_splits(
    sums, weights, positions, out, splits, window,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """The splits of one row and query head, TOGETHER at a time from the first that it sees."""
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0) // SPLIT
    stop = (position + SPLIT) // SPLIT
    dims = tl.arange(0, PADDED)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([PADDED], tl.float32)
    for begin in range(first, stop, TOGETHER):
        split = begin + tl.arange(0, TOGETHER)
        inside = split < stop
        part = head * splits + split
        own = tl.load(weights + part * 2, mask=inside, other=float("-inf"))
        count = tl.load(weights + part * 2 + 1, mask=inside, other=0.0)
        real = inside[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(sums + part[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
        higher = tl.maximum(largest, tl.max(own, axis=0))
        scale = tl.where(inside, tl.exp(own - higher), 0.0)
        shrink = tl.exp(largest - higher)
        total = total * shrink + tl.sum(count * scale, axis=0)
        acc = acc * shrink + tl.sum(values * scale[:, None], axis=0)
        largest = higher
    result = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def split_size(max_position: int) -> int:
    """Keys in a split, for a model with this longest context. It depends on nothing else, so that results do not."""
    return max(_SHORTEST_SPLIT, triton.next_power_of_2(max_position) // _MOST_SPLITS)


def decode_attention(
    q: Tensor, cache: Tensor, batch: TokenBatch, scale: float, softcap: float | None, split: int
) -> Tensor:
    """Attention of one token a sequence (Flash-Decoding); the reference is `eeinfer.ops.attention.paged_attention`.

    The grid covers the width of the block tables, and programs beyond a row's own context end at once. A row at
    position -1 sees nothing and gets zeros.

    Args:
        q: [n, heads, head_dim], contiguous; bfloat16, float16 or float32.
        cache: one layer's [2, num_blocks, block_size, kv_heads, head_dim], in the type of q.
        batch: with `queries` None.
        scale: factor on the scores.
        softcap: bound of the scores; None for none.
        split: keys in a split, a multiple of 64; from `split_size`.

    Returns:
        [n, heads * head_dim].
    """
    rows, heads, head_dim = q.shape
    block_size, kv_heads = cache.shape[2:4]
    k_cache, v_cache = contiguous_halves(cache)
    splits = triton.cdiv(batch.block_tables.shape[1] * block_size, split)
    alone = splits == 1
    padded, window = padded_head(head_dim), batch.window
    out = torch.empty_like(q)
    sums = out if alone else torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    weights = out if alone else torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    _attend_split[(rows, kv_heads, splits)](
        *(q, k_cache, v_cache, batch.block_tables, batch.positions, out, sums, weights),
        *(batch.block_tables.stride(0), splits, window or 0, scale, softcap or 1.0),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PADDED=padded,
        BLOCK_SIZE=block_size,
        KEYS=tile(q.dtype, head_dim),
        SPLIT=split,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        ALONE=alone,
        num_warps=4,
        num_stages=2,
    )
    if not alone:
        _merge_splits[(rows, heads)](
            *(sums, weights, batch.positions, out, splits, window or 0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            PADDED=padded,
            SPLIT=split,
            TOGETHER=_TOGETHER,
            WINDOWED=window is not None,
            num_warps=4,
        )
    return out.flatten(1)
