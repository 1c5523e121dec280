"""GPT-Neo (EleutherAI 2021): GPT-2 whose every second layer has a window, with scores that are not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eeinfer.model.families import gpt2
from eeinfer.model.families.keys import count
from eeinfer.model.families.traits import ModelConfig

NAMES = replace(
    gpt2.NAMES,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    output="attn.attention.out_proj",
    transposed=False,
    ignored=(".attn.attention.bias", ".attn.attention.masked_bias"),
)


def gpt_neo(config: dict[str, Any]) -> ModelConfig:
    """Traits of a GPT-Neo model."""
    hidden, layers = count(config, "hidden_size"), count(config, "num_layers")
    return gpt2.learned_positions(
        config,
        names=NAMES,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=count(config, "intermediate_size", 4 * hidden),
        num_heads=count(config, "num_heads"),
        max_position=count(config, "max_position_embeddings", 2048),
        qkv_bias=False,
        attention_scale=1.0,
        windows=_windows(config, layers),
    )


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """From `attention_types`, a list of [kinds, how often]: [[["global", "local"], 12]]."""
    window, given = count(config, "window_size", 256), config.get("attention_types", [[["global", "local"], 12]])
    try:
        kinds = [kind for group, times in given for _ in range(times) for kind in group]
    except (TypeError, ValueError):
        raise ValueError(f"attention_types is {given!r}; it must be a list of [kinds, how often]") from None
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        raise ValueError(f"attention_types must name 'global' or 'local' for each of {layers} layers, got {kinds}")
    return tuple(window if kind == "local" else None for kind in kinds) if "local" in kinds else ()
