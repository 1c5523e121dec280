"""The tensors of a decoder, one stack a kind: `qkv[l]` is the fused projection of layer l.

Stacking all layers lets completion slice K and V projections of many layers out of it without a second copy of the
weights, and gives every tensor of a checkpoint one destination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from eeinfer.model.families import ModelConfig


@dataclass(slots=True, eq=False)
class Weights:
    """All tensors of a decoder with L layers. Biases and norms of heads are `None` where the family has none.

    Attributes:
        embedding: [V, d]; lm_head: [V, d], the same tensor when tied; final_norm: [d].
        attention_norm, mlp_norm: [L, d].
        qkv: [L, (heads + 2 kv_heads) head_dim, d], with qkv_bias; output: [L, d, heads head_dim], with output_bias.
        gate_up: [L, 2 f, d], with gate_up_bias; down: [L, d, f], with down_bias.
        q_norm, k_norm: [L, head_dim]; both or neither.
    """

    embedding: Tensor
    lm_head: Tensor
    final_norm: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class LayerWeights(NamedTuple):
    """One layer's views into the stacks."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Uninitialised weights of the right shapes; the loader checks that every one is filled."""
    layers, d, f = config.num_layers, config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = new(config.vocab_size, d)
    return Weights(
        embedding=embedding,
        lm_head=embedding if config.tied else new(config.vocab_size, d),
        final_norm=new(d),
        attention_norm=new(layers, d),
        mlp_norm=new(layers, d),
        qkv=new(layers, q + 2 * kv, d),
        output=new(layers, d, q),
        gate_up=new(layers, 2 * f, d),
        down=new(layers, d, f),
        qkv_bias=new(layers, q + 2 * kv) if config.qkv_bias else None,
        output_bias=new(layers, d) if config.output_bias else None,
        gate_up_bias=new(layers, 2 * f) if config.mlp_bias else None,
        down_bias=new(layers, d) if config.mlp_bias else None,
        q_norm=new(layers, config.head_dim) if config.qk_norm else None,
        k_norm=new(layers, config.head_dim) if config.qk_norm else None,
    )


def stored(weights: Weights) -> dict[str, Tensor]:
    """The tensors that take memory, by field name: without those that the family lacks, and a tied head."""
    found = {field.name: getattr(weights, field.name) for field in fields(weights)}
    if weights.lm_head is weights.embedding:
        del found["lm_head"]
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights of such a decoder take in memory."""
    return sum(tensor.nbytes for tensor in stored(empty_weights(config, dtype, torch.device("meta"))).values())


def layer_views(weights: Weights, num_layers: int) -> list[LayerWeights]:
    """The stacks cut into layers; views, no copies."""

    def cut(name: str) -> list[Tensor | None]:
        stack = getattr(weights, name)
        return [None] * num_layers if stack is None else list(stack.unbind(0))

    return [LayerWeights(*parts) for parts in zip(*map(cut, LayerWeights._fields), strict=True)]


def destinations(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor name that a checkpoint must have, with the view that it fills. The families name them alike."""
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.final_norm
    if not config.tied:
        yield "lm_head.weight", weights.lm_head
    for index, layer in enumerate(layer_views(weights, config.num_layers)):
        for name, tensor in _layer_destinations(config, layer):
            if tensor is not None:
                yield f"model.layers.{index}.{name}", tensor


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor | None]]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    d, f = config.hidden_size, config.intermediate_size
    yield "input_layernorm.weight", layer.attention_norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    yield "self_attn.q_norm.weight", layer.q_norm
    yield "self_attn.k_norm.weight", layer.k_norm
    for names, sizes, weight, bias in (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), [q, kv, kv], layer.qkv, layer.qkv_bias),
        (("self_attn.o_proj",), [d], layer.output, layer.output_bias),
        (("mlp.gate_proj", "mlp.up_proj"), [f, f], layer.gate_up, layer.gate_up_bias),
        (("mlp.down_proj",), [d], layer.down, layer.down_bias),
    ):
        for suffix, fused in (("weight", weight), ("bias", bias)):
            if fused is not None:
                yield from zip([f"{name}.{suffix}" for name in names], fused.split(sizes), strict=True)
