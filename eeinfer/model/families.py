"""What a decoder is made of, read from a Hugging Face `config.json`, and where its tensors are in the checkpoint.

A family is traits of one decoder (`ModelConfig`) and a table of tensor names. The decoder chooses its parts from the
traits when it is built; nothing branches on a family's name afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eeinfer.errors import ModelError
from eeinfer.model.folder import CONFIG_FILE, read_json
from eeinfer.ops.rope import SCALING_KEYS


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and traits of a decoder.

    Attributes:
        num_layers, hidden_size, intermediate_size, vocab_size: sizes.
        num_heads, num_kv_heads, head_dim: of attention.
        max_position: longest context.
        norm_eps: of the RMS norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: parameters of the scaling, positive numbers; `rope_type` names it.
        qkv_bias, output_bias, mlp_bias: whether those projections have biases.
        qk_norm: whether each head of q and k is normalised before its rotation, with gains of the layer's own.
        tied: the vocabulary matrix is the embedding.
        dtype: number type of the checkpoint, as spelled in its config.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str


def model_config(folder: Path, file: str = CONFIG_FILE) -> ModelConfig:
    """Traits of the model in `folder`, of which `file` is the config.

    Raises:
        ModelError: an unknown architecture, activation or RoPE kind, a sliding window, or a missing or unusable key.
    """
    path = folder / file
    config = read_json(path)
    architectures = config.get("architectures")
    known = [name for name in FAMILIES if isinstance(architectures, list) and name in architectures]
    if not known:
        own = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise ModelError(f"{path}: architecture {architectures} is not supported; known are {', '.join(FAMILIES)}{own}")
    try:
        return FAMILIES[known[0]](config)
    except KeyError as error:
        raise ModelError(f"{path}: the key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None


def _llama(config: dict[str, Any]) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    return _decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _qwen2(config: dict[str, Any]) -> ModelConfig:
    _refuse_sliding_window(config)
    return _decoder(config, qkv_bias=True, max_position=32768)


def _qwen3(config: dict[str, Any]) -> ModelConfig:
    _refuse_sliding_window(config)
    bias = bool(config.get("attention_bias", False))
    return _decoder(config, qkv_bias=bias, output_bias=bias, qk_norm=True, head_dim=128, max_position=32768)


FAMILIES: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _decoder(
    config: dict[str, Any],
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    max_position: int = 2048,
) -> ModelConfig:
    """The sizes, which all families spell alike, with the traits and the defaults of one."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act is {activation!r}; the only one known for this architecture is 'silu'")
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _count(config, "head_dim", head_dim or hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions turn pairs, so it must be even")
    theta, scaling = _rope(config)
    return ModelConfig(
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_count(config, "max_position_embeddings", max_position),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _refuse_sliding_window(config: dict[str, Any]) -> None:
    """A `sliding_window` counts only where `use_sliding_window` says so; released configs have one that is off."""
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; attention over a sliding window is not supported")
    if "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError("layer_types has 'sliding_attention'; attention over a sliding window is not supported")


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise KeyError(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a positive integer")
    return value


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise KeyError(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{key} is {value!r}; it must be a positive number")
    return float(value)


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling. Newer configs keep both in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise TypeError(f"{key} is {given!r}; it must be an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in list(SCALING_KEYS):
        raise ValueError(f"RoPE kind {kind!r} is not supported; known are {', '.join(SCALING_KEYS)}")
    if missing := [name for name in SCALING_KEYS[kind] if given.get(name) is None]:
        raise ValueError(f"RoPE kind {kind!r} needs {', '.join(missing)}")
    scaling: dict[str, Any] = {name: _number(given, name) for name in SCALING_KEYS[kind]}
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    theta = _number({"rope_theta": given.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10_000.0)
    return theta, scaling | {"rope_type": kind}
