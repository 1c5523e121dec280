"""Configs and random weights of tiny models beyond Llama and Qwen, named as the families' own checkpoints name them.

Written down independently of eeinfer's table of names; `test_transformers.py` has transformers load each without a
tensor missing or left over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Part = tuple[str, tuple[int, ...], str]  # name, shape, kind: "matrix", "bias", "gain" or "embedding"

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 272,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 0,
}


def _config(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    return _SIZES | {"architectures": [architecture], "model_type": model_type} | own


CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": _config("MistralForCausalLM", "mistral", head_dim=12, sliding_window=7, hidden_act="silu"),
    "gemma2": _config(
        "Gemma2ForCausalLM",
        "gemma2",
        head_dim=12,
        sliding_window=5,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=6,
        sliding_window_pattern=3,
        query_pre_attn_scalar=10,
        rope_theta=1000.0,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 3.0},
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "olmo2": _config("Olmo2ForCausalLM", "olmo2", hidden_act="silu"),
    "phi3": _config(
        "Phi3ForCausalLM",
        "phi3",
        hidden_act="silu",
        partial_rotary_factor=0.5,
        max_position_embeddings=320,
        original_max_position_embeddings=160,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]},
    ),
    "phi3-window": _config("Phi3ForCausalLM", "phi3", hidden_act="silu", sliding_window=9),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 6,
        "n_inner": 48,
        "n_positions": 160,
        "vocab_size": 272,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
    "gpt-neo": {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "hidden_size": 32,
        "num_heads": 4,
        "num_layers": 6,
        "attention_types": [[["global", "local"], 3]],
        "window_size": 5,
        "max_position_embeddings": 160,
        "vocab_size": 272,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
}


def _decoder(config: dict[str, Any], layer: list[Part]) -> Iterator[Part]:
    """What all but GPT-2 and GPT-Neo have, with the parts of one layer repeated."""
    d = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], d), "embedding"
    for i in range(config["num_hidden_layers"]):
        yield from ((f"model.layers.{i}.{name}", shape, kind) for name, shape, kind in layer)
    yield "model.norm.weight", (d,), "gain"
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], d), "embedding"


def _sizes(config: dict[str, Any]) -> tuple[int, int, int, int, int]:
    d, f, heads, kv = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.get("head_dim", d // heads)
    return d, f, heads * head_dim, kv * head_dim, head_dim


def _projections(config: dict[str, Any]) -> list[Part]:
    d, f, q, kv, _ = _sizes(config)
    shapes = {"self_attn.q": (q, d), "self_attn.k": (kv, d), "self_attn.v": (kv, d), "self_attn.o": (d, q)}
    shapes |= {"mlp.gate": (f, d), "mlp.up": (f, d), "mlp.down": (d, f)}
    return [(f"{name}_proj.weight", shape, "matrix") for name, shape in shapes.items()]


def _gains(config: dict[str, Any], *names: str) -> list[Part]:
    return [(f"{name}.weight", (config["hidden_size"],), "gain") for name in names]


def parts(config: dict[str, Any]) -> Iterator[Part]:
    """Every tensor of the checkpoint."""
    match config["model_type"]:
        case "mistral":
            norms = _gains(config, "input_layernorm", "post_attention_layernorm")
            yield from _decoder(config, [*norms, *_projections(config)])
        case "gemma2" | "gemma3_text" as kind:
            before = ["input_layernorm", "pre_feedforward_layernorm"]
            norms = _gains(config, *before, "post_attention_layernorm", "post_feedforward_layernorm")
            if kind == "gemma3_text":
                norms += _head_gains(config["head_dim"], config["head_dim"])
            yield from _decoder(config, [*norms, *_projections(config)])
        case "olmo2":
            norms = _gains(config, "post_attention_layernorm", "post_feedforward_layernorm")
            _, _, q, kv, _ = _sizes(config)
            yield from _decoder(config, [*norms, *_head_gains(q, kv), *_projections(config)])
        case "phi3":
            norms = _gains(config, "input_layernorm", "post_attention_layernorm")
            d, f, q, kv, _ = _sizes(config)
            shapes = {"self_attn.qkv": (q + 2 * kv, d), "self_attn.o": (d, q)}
            shapes |= {"mlp.gate_up": (2 * f, d), "mlp.down": (d, f)}
            fused = [(f"{name}_proj.weight", shape, "matrix") for name, shape in shapes.items()]
            yield from _decoder(config, [*norms, *fused])
        case "gpt2":
            yield from _gpt(config, config["n_layer"], {"attn.c_attn": 3, "attn.c_proj": 1})
        case "gpt_neo":
            names = {f"attn.attention.{name}_proj": 1 for name in ("q", "k", "v", "out")}
            yield from _gpt(config, config["num_layers"], names)
        case kind:
            raise AssertionError(kind)


def _head_gains(q: int, k: int) -> list[Part]:
    return [("self_attn.q_norm.weight", (q,), "gain"), ("self_attn.k_norm.weight", (k,), "gain")]


def _gpt(config: dict[str, Any], layers: int, attention: dict[str, int]) -> Iterator[Part]:
    """`attention`: names of its matrices with how many outputs of size d they fuse."""
    d, inner = config_width(config), config.get("n_inner") or 4 * config_width(config)
    positions = config.get("n_positions") or config["max_position_embeddings"]
    yield "transformer.wte.weight", (config["vocab_size"], d), "embedding"
    yield "transformer.wpe.weight", (positions, d), "matrix"
    matrices = {name: (fused * d, d) for name, fused in attention.items()}
    matrices |= {"mlp.c_fc": (inner, d), "mlp.c_proj": (d, inner)}
    norms = [f"h.{i}.{name}" for i in range(layers) for name in ("ln_1", "ln_2")]
    for name in [*norms, "ln_f"]:
        yield f"transformer.{name}.weight", (d,), "gain"
        yield f"transformer.{name}.bias", (d,), "bias"
    for i in range(layers):
        for name, (rows, columns) in matrices.items():
            gpt2 = "n_embd" in config  # whose matrices are [in, out]
            yield f"transformer.h.{i}.{name}.weight", (columns, rows) if gpt2 else (rows, columns), "matrix"
            if gpt2 or not name.endswith(("q_proj", "k_proj", "v_proj")):
                yield f"transformer.h.{i}.{name}.bias", (rows,), "bias"


def weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random values of a size at which every layer and the attention matter."""
    center = 0.0 if config["model_type"].startswith("gemma") else 1.0

    def draw(shape: tuple[int, ...], kind: str) -> np.ndarray:
        if kind == "gain":
            return rng.uniform(center - 0.4, center + 0.4, shape)
        if kind == "bias":
            return rng.standard_normal(shape) * 0.3
        return rng.standard_normal(shape) * (3.0 if kind == "embedding" else 1.3) / config_width(config) ** 0.5

    return {name: draw(shape, kind).astype(np.float32) for name, shape, kind in parts(config)}


def config_width(config: dict[str, Any]) -> int:
    """d, however the family spells it."""
    return int(config.get("hidden_size") or config["n_embd"])
