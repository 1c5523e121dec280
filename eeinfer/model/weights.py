"""The tensors of a decoder, one stack a kind: `qkv[l]` is the fused projection of layer l.

Stacking all layers lets completion project K and V of many layers in one batched product without a second copy of the
weights, and gives every tensor of a checkpoint one destination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eeinfer.model.families import ModelConfig


@dataclass(slots=True, eq=False)
class Weights:
    """All tensors of a decoder with L layers. Biases are `None` where the family has none.

    Attributes:
        embedding: [V, d]; lm_head: [V, d], the same tensor when tied; final_norm: [d].
        attention_norm, mlp_norm: [L, d].
        qkv: [L, (heads + 2 kv_heads) head_dim, d], with qkv_bias; output: [L, d, heads head_dim], with output_bias.
        gate_up: [L, 2 f, d], with gate_up_bias; down: [L, d, f], with down_bias.
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


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Uninitialised weights of the right shapes; the loader checks that every one is filled."""
    layers, d, f = config.num_layers, config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = new(config.vocab_size, d)
    attention, mlp = config.attention_bias, config.mlp_bias
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
        qkv_bias=new(layers, q + 2 * kv) if attention else None,
        output_bias=new(layers, d) if attention else None,
        gate_up_bias=new(layers, 2 * f) if mlp else None,
        down_bias=new(layers, d) if mlp else None,
    )


def layer_views(weights: Weights, num_layers: int) -> list[LayerWeights]:
    """The stacks cut into layers; views, no copies."""

    def cut(name: str) -> list[Tensor | None]:
        stack = getattr(weights, name)
        return [None] * num_layers if stack is None else list(stack.unbind(0))

    return [LayerWeights(*parts) for parts in zip(*map(cut, LayerWeights._fields), strict=True)]


def destinations(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor name that a checkpoint of the Llama family must have, with the view that it fills."""
    q, kv, f = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.final_norm
    if not config.tied:
        yield "lm_head.weight", weights.lm_head
    for index, layer in enumerate(layer_views(weights, config.num_layers)):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", layer.attention_norm
        yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
        for suffix, qkv, output, gate_up, down in (
            ("weight", layer.qkv, layer.output, layer.gate_up, layer.down),
            ("bias", layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias),
        ):
            if qkv is not None and output is not None:
                for name, part in zip("qkv", qkv.split([q, kv, kv]), strict=True):
                    yield f"{prefix}self_attn.{name}_proj.{suffix}", part
                yield f"{prefix}self_attn.o_proj.{suffix}", output
            if gate_up is not None and down is not None:
                for name, part in zip(("gate", "up"), gate_up.split([f, f]), strict=True):
                    yield f"{prefix}mlp.{name}_proj.{suffix}", part
                yield f"{prefix}mlp.down_proj.{suffix}", down
