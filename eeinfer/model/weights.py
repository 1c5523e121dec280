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
from eeinfer.model.host_memory import empty
from eeinfer.ops.norm import at_least_float32


@dataclass(slots=True, eq=False)
class Weights:
    """All tensors of a decoder with L layers; `None` where the family has none. Gains hold their offset already.

    Attributes:
        embedding: [V, d]; lm_head: [V, d], the same tensor when tied; positions: [longest context, d].
        final_norm: [d], with final_norm_bias.
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: [L, d]; the first and third with biases.
        qkv: [L, (heads + 2 kv_heads) head_dim, d], with qkv_bias; output: [L, d, heads head_dim], with output_bias.
        gate_up: [L, 2 f, d], or [L, f, d] without a gate, with gate_up_bias; down: [L, d, f], with down_bias.
        q_norm, k_norm: [L, head_dim], or [L, heads head_dim] and [L, kv_heads head_dim]; both or neither.
    """

    embedding: Tensor
    lm_head: Tensor
    final_norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    positions: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    final_norm_bias: Tensor | None = None


class LayerWeights(NamedTuple):
    """One layer's views into the stacks."""

    attention_norm: Tensor | None
    attention_norm_bias: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_norm_bias: Tensor | None
    post_mlp_norm: Tensor | None
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
    """Uninitialised weights of the right shapes; the loader checks that every one is filled.

    Gains with an offset are small numbers beside 1, so they are kept in float32 or wider: rounded to bfloat16 after
    the addition they would lose most of their digits.
    """
    shapes = {"embedding": (config.vocab_size, config.hidden_size), **_model_shapes(config), **_layer_shapes(config)}
    gains = at_least_float32(dtype) if config.norm_offset else dtype
    tensors = {name: empty(shape, gains if name.endswith("norm") else dtype, device) for name, shape in shapes.items()}
    return Weights(**({"lm_head": tensors["embedding"]} | tensors))


def _model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"final_norm": (d,)}
    if not config.tied:
        shapes["lm_head"] = (config.vocab_size, d)
    if config.positions == "learned":
        shapes["positions"] = (config.max_position, d)
    if config.norm == "layer":
        shapes["final_norm_bias"] = (d,)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = 2 * f if config.gated else f
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (q + 2 * kv, d),
        "output": (d, q),
        "gate_up": (inner, d),
        "down": (d, f),
    }
    shapes |= {"attention_norm": (d,), "mlp_norm": (d,)} if config.pre_norm else {}
    shapes |= {"attention_norm_bias": (d,), "mlp_norm_bias": (d,)} if config.norm == "layer" else {}
    shapes |= {"post_attention_norm": (d,), "post_mlp_norm": (d,)} if config.post_norm else {}
    shapes |= {"qkv_bias": (q + 2 * kv,)} if config.qkv_bias else {}
    shapes |= {"output_bias": (d,)} if config.output_bias else {}
    shapes |= {"gate_up_bias": (inner,), "down_bias": (d,)} if config.mlp_bias else {}
    if config.qk_norm:
        sizes = (q, kv) if config.qk_norm_whole else (config.head_dim, config.head_dim)
        shapes |= {"q_norm": sizes[:1], "k_norm": sizes[1:]}
    return {name: (config.num_layers, *shape) for name, shape in shapes.items()}


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
    """Every tensor name that a checkpoint must have, with the view that it fills."""
    names = config.names
    yield f"{names.prefix}{names.embedding}.weight", weights.embedding
    if not config.tied:
        yield "lm_head.weight", weights.lm_head
    parts = [
        (names.positions, weights.positions, None),
        (names.final_norm, weights.final_norm, weights.final_norm_bias),
    ]
    for index, layer in enumerate(layer_views(weights, config.num_layers)):
        for name, weight, bias in _layer_destinations(config, layer):
            parts.append((f"{names.layers}.{index}.{name}", weight, bias))
    for name, weight, bias in parts:
        if weight is not None:
            yield f"{names.prefix}{name}.weight", weight
        if bias is not None:
            yield f"{names.prefix}{name}.bias", bias


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Name of each part of a layer, with its weight and bias."""
    names = config.names
    yield names.attention_norm, layer.attention_norm, layer.attention_norm_bias
    yield names.post_attention_norm, layer.post_attention_norm, None
    yield names.mlp_norm, layer.mlp_norm, layer.mlp_norm_bias
    yield names.post_mlp_norm, layer.post_mlp_norm, None
    yield names.q_norm, layer.q_norm, None
    yield names.k_norm, layer.k_norm, None
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for parts, sizes, weight, bias in (
        (names.qkv, [q, kv, kv], layer.qkv, layer.qkv_bias),
        ((names.output,), [config.hidden_size], layer.output, layer.output_bias),
        (names.gate_up, [config.intermediate_size] * 2, layer.gate_up, layer.gate_up_bias),
        ((names.down,), [config.hidden_size], layer.down, layer.down_bias),
    ):
        cut = sizes if len(parts) == len(sizes) else [len(weight)]  # one name: the checkpoint fuses as we do
        weights = [part.T if names.transposed else part for part in weight.split(cut)]
        yield from zip(parts, weights, [None] * len(parts) if bias is None else bias.split(cut), strict=True)
