"""K and V into the paged cache: those of a layer with the rotation of q and k, and those of many skipped layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eeinfer.ops.attention import normed_in_pieces
from eeinfer.ops.triton.fold import contiguous_halves

_TILE = 16  # heads


@triton.jit
def _rotate_and_store(
    projected, cos, sin, q_gain, k_gain, slots, out, k_cache, v_cache, stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """TILE heads of one token, of q, k and v in that order. HALF: pairs that turn; 0 for none."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    is_q = (head < HEADS)[:, None]
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    source = projected + row * stride + head[:, None] * HEAD_DIM
    x = tl.load(source + dims[None, :], mask=inside, other=0.0)
    wide = x.to(tl.float32)
    pair = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    other = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        size = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        real = dims < HEAD_DIM
        gain = _either(is_q, q_gain + dims, k_gain + dims, real)
        pair_gain = _either(is_q, q_gain + pair, k_gain + pair, real)
        # Rounded as the reference rounds between norm and rotation.
        wide = (wide * size * gain).to(x.dtype).to(tl.float32)
        other = (other * size * pair_gain).to(x.dtype).to(tl.float32)
    if HALF > 0:
        turns = dims < 2 * HALF
        angle = row * HALF + tl.where(dims < HALF, dims, dims - HALF)
        c = tl.load(cos + angle, mask=turns, other=1.0)[None, :]
        s = tl.load(sin + angle, mask=turns, other=0.0)[None, :]
        turned = wide * c + tl.where((dims < HALF)[None, :], -other, other) * s
        wide = tl.where(turns[None, :], turned, wide)
    turned_x = wide.to(x.dtype)
    slot = tl.load(slots + row)
    stored = inside & (slot + tl.zeros_like(head)[:, None] >= 0)  # a block: interpreters keep no bools in scalars
    tl.store(out + (row * HEADS + head[:, None]) * HEAD_DIM + dims[None, :], turned_x, mask=inside & is_q)
    k_at = (slot * KV_HEADS + head[:, None] - HEADS) * HEAD_DIM + dims[None, :]
    tl.store(k_cache + k_at, turned_x, mask=stored & (is_q == 0) & (is_v == 0))
    tl.store(v_cache + k_at - KV_HEADS * HEAD_DIM, x, mask=stored & is_v)


@triton.jit
def _either(first, at_first, at_second, real):
    """What lies at one place or the other, float32 [rows, dims]; `first` [rows, 1], places [dims]."""
    one = tl.load(at_first, mask=real, other=0.0).to(tl.float32)
    two = tl.load(at_second, mask=real, other=0.0).to(tl.float32)
    return tl.where(first, one[None, :], two[None, :])


def rotate_and_store(
    projected: Tensor,
    cache: Tensor,
    slots: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """As `eeinfer.ops.attention.rotate_and_store`, but for tokens with slot -1, which are turned and not stored.

    Args:
        projected: [n, (heads + 2 kv_heads) * head_dim], rows contiguous; bfloat16, float16 or float32.
        cache: one layer's [2, num_blocks, block_size, kv_heads, head_dim], in the type of `projected`.
        slots: int64 [n].
        rotation: float32 [n, 1, rotary_dim / 2] each; None leaves q and k as they are.
        gains: [head_dim] each, or of whole projections, whose norms are torch's; None: no norms.
        eps: of the norms.

    Returns:
        q, [n, heads, head_dim].
    """
    kv_heads, head_dim = cache.shape[3:]
    heads = projected.shape[1] // head_dim - 2 * kv_heads
    if gains is not None and gains[0].shape[-1] != head_dim:
        parts = projected.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
        q, k = (normed_in_pieces(x, gain, eps) for x, gain in zip(parts, gains, strict=False))
        projected, gains = torch.cat((q, k, parts[2]), dim=-1), None
    k_cache, v_cache = contiguous_halves(cache)
    out = torch.empty(len(projected), heads, head_dim, dtype=projected.dtype, device=projected.device)
    cos, sin = (projected, projected) if rotation is None else rotation  # what is not read is any tensor
    q_gain, k_gain = (projected, projected) if gains is None else gains
    together = min(_TILE, triton.next_power_of_2(heads + 2 * kv_heads))
    _rotate_and_store[(len(projected), triton.cdiv(heads + 2 * kv_heads, together))](
        *(projected, cos, sin, q_gain, k_gain, slots, out, k_cache, v_cache, projected.stride(0), eps),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        TILE=together,
        HALF=0 if rotation is None else cos.shape[-1],
        NORMED=gains is not None,
        num_warps=4,
    )
    return out


@triton.jit
def _store_layers(
    k, v, slots, k_cache, v_cache, k_layer, k_row, v_layer, v_row, cache_layer,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """K and V of one token in one layer."""
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.arange(0, PADDED)
    inside = (at < SIZE) & (slot + tl.zeros_like(at) >= 0)  # a block: interpreters keep no bools in scalars
    target = layer * cache_layer + slot * SIZE + at
    tl.store(k_cache + target, tl.load(k + layer * k_layer + row * k_row + at, mask=inside), mask=inside)
    tl.store(v_cache + target, tl.load(v + layer * v_layer + row * v_row + at, mask=inside), mask=inside)


def store_layers(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """As `eeinfer.ops.attention.store_layers`, in one launch; tokens with slot -1 are not stored.

    Args:
        cache: [m, 2, num_blocks, block_size, kv_heads, head_dim], contiguous.
        k: [m, n, kv_heads, head_dim], in the type of the cache; layers and tokens may have any stride.
        v: alike.
        slots: int64 [n].
    """
    layers, count = k.shape[:2]
    size = cache.shape[4] * cache.shape[5]
    assert cache.is_contiguous(), "the layers from some one on are a contiguous part of the cache"
    k, v = k.flatten(2), v.flatten(2)
    _store_layers[(count, layers)](
        *(k, v, slots, cache[:, 0], cache[:, 1], k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.stride(0)),
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        num_warps=4,
    )
