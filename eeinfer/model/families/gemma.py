"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eeinfer.model.families.keys import choice, count, number, optional_number, refuse, rope, windows
from eeinfer.model.families.llama import decoder
from eeinfer.model.families.traits import LLAMA_NAMES, ModelConfig

NAMES = replace(
    LLAMA_NAMES,
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


def gemma2(config: dict[str, Any]) -> ModelConfig:
    """Every second layer has a window; scores and logits are bounded."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(count(config, "num_hidden_layers"))]
    traits = _gemma(config, kinds)
    traits["attention_softcap"] = optional_number(config, "attn_logit_softcapping", 50.0)
    traits["logit_softcap"] = optional_number(config, "final_logit_softcapping", 30.0)
    return decoder(config, head_dim=256, max_position=8192, tied=True, **traits)


def gemma3(config: dict[str, Any]) -> ModelConfig:
    """All layers but every sixth have a window and a rotary base of their own; norms of heads in place of bounds."""
    pattern = count(config, "sliding_window_pattern", count(config, "_sliding_window_pattern", 6))
    layers = range(1, count(config, "num_hidden_layers") + 1)
    kinds = ["sliding_attention" if i % pattern else "full_attention" for i in layers]
    traits = _gemma(config, kinds) | _ropes(config, count(config, "max_position_embeddings", 131072))
    traits["attention_softcap"] = optional_number(config, "attn_logit_softcapping", None)
    traits["logit_softcap"] = optional_number(config, "final_logit_softcapping", None)
    return decoder(config, head_dim=256, max_position=131072, tied=True, qk_norm=True, **traits)


def _gemma(config: dict[str, Any], layer_types: list[str]) -> dict[str, Any]:
    """What both have."""
    refuse(config, "use_bidirectional_attention", "only causal attention is supported")
    bias = bool(config.get("attention_bias", False))
    return {
        "names": NAMES,
        "norm_offset": 1.0,
        "post_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": choice(config, "hidden_activation", "gelu_pytorch_tanh", ["gelu_pytorch_tanh"]),
        "embedding_scale": count(config, "hidden_size") ** 0.5,
        "attention_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "windows": windows(config, layer_types, 4096),
    }


def _ropes(config: dict[str, Any], max_position: int) -> dict[str, Any]:
    """Bases of both kinds of layers. Newer configs keep them by layer type, older ones in keys of their own."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        raise TypeError(f"rope_parameters is {nested!r}; it must be an object")
    if "full_attention" not in nested and "sliding_attention" not in nested:
        theta, scaling = rope(config, max_position, 1_000_000.0)
        local = number(config, "rope_local_base_freq", 10_000.0)
        return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}
    theta, scaling = rope({"rope_parameters": nested.get("full_attention")}, max_position, 1_000_000.0)
    local, plain = rope({"rope_parameters": nested.get("sliding_attention")}, max_position)
    if plain["rope_type"] != "default":
        raise ValueError(f"RoPE kind {plain['rope_type']!r} is not supported in layers with a window")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}
