"""The step that all attention kernels share: a run of keys is taken into the softmax of some queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def fold(
    q, largest, total, acc, k_cache, v_cache, table, start, stop, position, kv_head, scale, softcap, window,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Online softmax (FlashAttention, arXiv 2205.14135) over the keys from `start` to before `stop`, KEYS at a time.

    Args:
        q: [ROWS, PADDED].
        largest, total, acc: float32 [ROWS], [ROWS] and [ROWS, PADDED]: the largest score so far, the sum of weights
            beside it, and of weighted values.
        table: where the sequence's block table begins.
        position: int32 [ROWS]; -1 for rows that see none of these keys. They may become NaN: 0 times NaN is NaN.
        The others are as in `eeinfer.ops.attention.paged_attention`; caches are contiguous.

    Returns:
        largest, total and acc.
    """
    dims = tl.arange(0, PADDED)
    real = dims < HEAD_DIM
    for offset in range(start, stop, KEYS):
        keys = offset + tl.arange(0, KEYS)
        inside = keys < stop
        block = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = ((block * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(k_cache + at[None, :] + dims[:, None], mask=inside[None, :] & real[:, None], other=0.0)
        v = tl.load(v_cache + at[:, None] + dims[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        # Without "ieee" float32 would be multiplied in TF32, with 10 bits.
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        seen = inside[None, :] & (keys[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: exp(-inf - 0) is 0
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = higher
    return largest, total, acc


def padded_head(head_dim: int) -> int:
    """The power of two that a head is padded to; products need 16."""
    return max(16, triton.next_power_of_2(head_dim))


def tile(dtype: torch.dtype, head_dim: int) -> int:
    """Keys, or queries of a prefill, that are taken at a time: as many as registers hold on an H100 or H200."""
    numbers = 8192 if dtype.itemsize == 2 else 2048  # noqa: PLR2004 - float32 is multiplied without tensor cores
    return min(64, max(16, numbers // padded_head(head_dim)))


def contiguous_halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer's cache, each with pointers of its own, so that no offset spans both."""
    assert cache.is_contiguous(), "a layer's cache is a contiguous part of the whole"
    return cache[0], cache[1]
