"""Paged attention with grouped query heads, in plain torch: the reference that faster backends are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eeinfer.ops.norm import at_least_float32, rms_norm
from eeinfer.ops.rope import rotate
from eeinfer.ops.token_batch import TokenBatch


def store_kv(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write K and V of n tokens into one layer's cache.

    Args:
        cache: [2, num_blocks, block_size, kv_heads, head_dim], K then V.
        k: [n, kv_heads, head_dim].
        v: [n, kv_heads, head_dim].
        slots: [n] int64, block * block_size + offset.
    """
    flat = cache.flatten(1, 2)
    flat[0].index_copy_(0, slots, k)
    flat[1].index_copy_(0, slots, v)


def store_layers(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write K and V of n tokens into the cache of m layers.

    Args:
        cache: [m, 2, num_blocks, block_size, kv_heads, head_dim], K then V.
        k: [m, n, kv_heads, head_dim]; need not be contiguous.
        v: alike.
        slots: [n] int64.
    """
    flat = cache.flatten(2, 3)
    flat[:, 0, slots] = k
    flat[:, 1, slots] = v


def rotate_and_store(
    projected: Tensor,
    cache: Tensor,
    slots: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Turn the q and k of n tokens by their positions, after a norm if the model has one, and write K and V.

    Args:
        projected: [n, (heads + 2 kv_heads) * head_dim]: q, k and v side by side.
        cache: one layer's [2, num_blocks, block_size, kv_heads, head_dim].
        slots: [n] int64.
        rotation: from `eeinfer.ops.rope.rotations`; None leaves q and k as they are.
        gains: of the RMS norms of q and of k, [head_dim] for each head or [heads * head_dim] for all; None: no norms.
        eps: of those norms.

    Returns:
        q, [n, heads, head_dim].
    """
    kv_heads, head_dim = cache.shape[3:]
    q, k, v = projected.tensor_split((-2 * kv_heads * head_dim, -kv_heads * head_dim), dim=-1)
    if gains is not None:
        q, k = (normed_in_pieces(x, gain, eps) for x, gain in zip((q, k), gains, strict=True))
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    store_kv(cache, k, v, slots)
    return q


def normed_in_pieces(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., m * d] in pieces as long as `gain` [d]."""
    return rms_norm(x.unflatten(-1, (-1, gain.shape[-1])), gain, eps).flatten(-2)


def paged_attention(q: Tensor, cache: Tensor, batch: TokenBatch, scale: float, softcap: float | None = None) -> Tensor:
    """Softmax attention of each query over the cached keys of its sequence at positions up to its own.

    With a window the last of them alone; see `TokenBatch.within`.

    Args:
        q: [n, heads, head_dim]; query heads h … share the KV head h // (heads / kv_heads).
        cache: one layer's [2, num_blocks, block_size, kv_heads, head_dim]; the tokens' own K and V are in it already.
        batch: the n tokens.
        scale: factor on the scores.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); None leaves them.

    Returns:
        [n, heads * head_dim].
    """
    if batch.queries is None:
        return _decode(q, cache, batch.block_tables, batch.masks[0], scale, softcap)
    out = torch.empty_like(q)
    for (start, stop), mask, table in zip(batch.queries, batch.masks, batch.block_tables, strict=True):
        context = stop - start if mask is None else mask.shape[1]
        out[start:stop] = _prefill(q[start:stop], cache, table, context, mask, scale, softcap)
    return out.flatten(1)


def _gather(cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of `blocks` [m], [m * block_size, kv_heads, head_dim] each."""
    k, v = (half.flatten(1).index_select(0, blocks) for half in cache)
    return k.view(-1, *cache.shape[3:]), v.view(-1, *cache.shape[3:])


def _decode(
    q: Tensor, cache: Tensor, block_tables: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    rows, heads, head_dim = q.shape
    kv_heads = cache.shape[3]
    k, v = (x.view(rows, -1, kv_heads, head_dim).transpose(1, 2) for x in _gather(cache, block_tables.flatten()))
    # The query heads that share a KV head become the queries of one attention: no copy of K and V for each of them.
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    if softcap is not None:
        return _capped(grouped, k, v, mask, scale, softcap).reshape(rows, -1)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(rows, -1)


def _prefill(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    context: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    blocks = table[: -(-context // cache.shape[2])]
    k, v = (x[:context].transpose(0, 1)[None] for x in _gather(cache, blocks))
    heads_first = q.transpose(0, 1)[None]
    if softcap is not None:
        if mask is None:
            mask = torch.ones(context, context, dtype=torch.bool, device=q.device).tril()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = _capped(heads_first, k, v, mask, scale, softcap)
    else:
        out = F.scaled_dot_product_attention(
            heads_first, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention with capped scores, softmax in float32 or wider; the library's has no such cap."""
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    scores = scores.to(at_least_float32(q.dtype))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1).to(v.dtype) @ v
