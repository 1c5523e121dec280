"""Paged attention with grouped query heads, in plain torch: the reference that faster backends are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eeinfer.ops.norm import at_least_float32
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


def paged_attention(q: Tensor, cache: Tensor, batch: TokenBatch, scale: float, softcap: float | None = None) -> Tensor:
    """Softmax attention of each query over the cached keys of its sequence that the batch's masks show it.

    Without a window those are the keys at positions up to its own; see `TokenBatch.within`.

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
