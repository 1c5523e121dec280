"""OLMo 2 (arXiv 2501.00656): norms behind attention and MLP instead of before them, and over all of q and k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eeinfer.model.families.llama import decoder
from eeinfer.model.families.traits import LLAMA_NAMES, ModelConfig

NAMES = replace(LLAMA_NAMES, post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")


def olmo2(config: dict[str, Any]) -> ModelConfig:
    """Traits of an OLMo 2 model."""
    bias = bool(config.get("attention_bias", False))
    traits: dict[str, Any] = {"names": NAMES, "pre_norm": False, "post_norm": True}
    traits |= {"qk_norm": True, "qk_norm_whole": True, "qkv_bias": bias, "output_bias": bias}
    return decoder(config, norm_eps=1e-5, **traits)
