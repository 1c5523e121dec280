"""GPT-2 (Radford et al. 2019): learned positions, layer norm, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from eeinfer.model.families.keys import choice, count, number, refuse
from eeinfer.model.families.llama import number_type
from eeinfer.model.families.traits import ModelConfig, TensorNames

NAMES = TensorNames(
    prefix="transformer.",
    prefix_optional=True,
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layers="h",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu")


def gpt2(config: dict[str, Any]) -> ModelConfig:
    """Traits of a GPT-2 model."""
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        refuse(config, key, "this is not supported")
    hidden, heads = count(config, "n_embd"), count(config, "n_head")
    return learned_positions(
        config,
        names=NAMES,
        num_layers=count(config, "n_layer"),
        hidden_size=hidden,
        intermediate_size=count(config, "n_inner", 4 * hidden),
        num_heads=heads,
        max_position=count(config, "n_positions", count(config, "n_ctx", 1024)),
        qkv_bias=True,
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
    )


def learned_positions(config: dict[str, Any], *, hidden_size: int, num_heads: int, **traits: Any) -> ModelConfig:
    """What GPT-2 and GPT-Neo have in common."""
    if hidden_size % num_heads:
        raise ValueError(f"a hidden size of {hidden_size} is not a multiple of {num_heads} heads")
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=count(config, "vocab_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        rope_theta=1.0,
        rope_scaling={"rope_type": "default"},
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        dtype=number_type(config),
        norm="layer",
        activation=choice(config, "activation_function", "gelu_new", ACTIVATIONS),
        gated=False,
        positions="learned",
        **traits,
    )
