"""Phi-3 and its like (arXiv 2404.14219): Llama with fused tensors, heads that may turn in part, and LongRoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eeinfer.model.families.keys import count, number, rope
from eeinfer.model.families.llama import decoder
from eeinfer.model.families.traits import LLAMA_NAMES, ModelConfig

NAMES = replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def phi3(config: dict[str, Any]) -> ModelConfig:
    """Traits of a Phi-3, Phi-3.5 or Phi-4 (mini) model."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if isinstance(given, dict) and (given.get("rope_type") or given.get("type")) in {"su", "yarn"}:
        given = given | {"rope_type": "longrope"}  # what early releases called it
    longest = count(config, "max_position_embeddings", 4096)
    theta, scaling = rope(config | {key: given}, longest)
    window = config.get("sliding_window")
    layers, head_dim = (
        count(config, "num_hidden_layers"),
        count(config, "hidden_size") // count(config, "num_attention_heads"),
    )
    share = number(given, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if share > 1 or int(head_dim * share) % 2:
        raise ValueError(f"partial_rotary_factor is {share}; it must leave an even part of {head_dim} numbers")
    if len(scaling.get("short_factor", ())) not in {0, int(head_dim * share) // 2}:
        raise ValueError(f"short_factor must have {int(head_dim * share) // 2} numbers")
    return decoder(
        config,
        norm_eps=1e-5,
        max_position=4096,
        names=NAMES,
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=int(head_dim * share),
        windows=() if window is None else (count(config, "sliding_window"),) * layers,
    )
