"""Llama, Mistral and Qwen: pre-norm decoders with rotary positions and a gated MLP."""

from __future__ import annotations

from typing import Any

from eeinfer.model.families.keys import choice, count, number, rope, windows
from eeinfer.model.families.traits import ModelConfig


def decoder(
    config: dict[str, Any],
    *,
    head_dim: int | None = None,
    max_position: int = 2048,
    theta: float = 10_000.0,
    norm_eps: float = 1e-6,
    tied: bool = False,
    **traits: Any,
) -> ModelConfig:
    """The sizes, which most families spell alike.

    Args:
        config: the config.json.
        head_dim: what the family takes where the config says nothing; None for hidden size / heads.
        max_position: the same for the longest context.
        theta: the same for the base of the rotary frequencies.
        norm_eps: the same for the norms.
        tied: the same for the vocabulary matrix.
        traits: what else the family is made of, by the names of `ModelConfig`; they win over what is read here.
    """
    heads = count(config, "num_attention_heads")
    hidden = count(config, "hidden_size")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(config, "head_dim", head_dim or hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions turn pairs, so it must be even")
    longest = count(config, "max_position_embeddings", max_position)
    if "rope_theta" not in traits:
        traits["rope_theta"], traits["rope_scaling"] = rope(config, longest, theta)
    if traits["rope_scaling"]["rope_type"] == "longrope":  # beyond it all keys would have to be turned again
        longest = min(longest, int(traits["rope_scaling"]["original_max_position_embeddings"]))
    if "activation" not in traits:
        traits["activation"] = choice(config, "hidden_act", "silu", ["silu"])
    plain: dict[str, Any] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False}
    return ModelConfig(
        num_layers=count(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=count(config, "intermediate_size"),
        vocab_size=count(config, "vocab_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=longest,
        norm_eps=number(config, "rms_norm_eps", norm_eps),
        tied=bool(config.get("tie_word_embeddings", tied)),
        dtype=number_type(config),
        **plain | traits,
    )


def number_type(config: dict[str, Any]) -> str:
    """Of the checkpoint; releases of transformers spell the key differently."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def llama(config: dict[str, Any]) -> ModelConfig:
    """Llama 1 to 3, SmolLM and what else took its form."""
    bias = bool(config.get("attention_bias", False))
    return decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: dict[str, Any]) -> ModelConfig:
    """Mistral: Llama, in its first release with a window in all layers."""
    layers = count(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096)
    everywhere = () if window is None else (count({"sliding_window": window}, "sliding_window"),) * layers
    return decoder(config, max_position=131072, windows=everywhere)


def qwen2(config: dict[str, Any]) -> ModelConfig:
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v."""
    return decoder(config, qkv_bias=True, max_position=32768, windows=_qwen_windows(config))


def qwen3(config: dict[str, Any]) -> ModelConfig:
    """Qwen3: Llama with norms on the heads of q and k."""
    bias = bool(config.get("attention_bias", False))
    traits: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return decoder(config, head_dim=128, max_position=32768, windows=_qwen_windows(config), **traits)


def _qwen_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """The window of the layers from `max_window_layers` on, or of those that `layer_types` lists.

    It counts only where `use_sliding_window` says so; released configs have one that is off.
    """
    if not config.get("use_sliding_window"):
        if "sliding_attention" in (config.get("layer_types") or []):
            raise ValueError("layer_types has 'sliding_attention', but use_sliding_window is not true")
        return ()
    layers, first = count(config, "num_hidden_layers"), config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise TypeError(f"max_window_layers is {first!r}; it must be an integer")
    return windows(config, ["sliding_attention" if i >= first else "full_attention" for i in range(layers)], 4096)
