"""The config.json of a model in a GGUF file, for each architecture that can be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eeinfer.model.gguf_file import GgufFile

_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale their scores otherwise (`llama-model.cpp`)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2


def hf_config(gguf: GgufFile, dtype: str) -> dict[str, Any]:
    """The config.json, `dtype` being the type of its weights.

    Raises ModelError for architectures and variants that are not known here.
    """
    if (architecture := gguf.architecture) not in ARCHITECTURES:
        raise gguf.unsupported(f"architecture {architecture!r} cannot be imported (known: {', '.join(ARCHITECTURES)})")
    return _sizes(gguf) | ARCHITECTURES[architecture](gguf) | {"torch_dtype": dtype}


def _sizes(gguf: GgufFile) -> dict[str, Any]:
    heads, hidden_size = gguf.own("attention.head_count", int), gguf.own("embedding_length", int)
    head_dim = gguf.own("attention.key_length", int, hidden_size // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if gguf.own(key, int, head_dim) != head_dim:
            raise gguf.unsupported(f"{gguf.architecture}.{key} is not the head size {head_dim}")
    ids = gguf.special_tokens()
    return {
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens", list)),
        "hidden_size": hidden_size,
        "intermediate_size": gguf.own("feed_forward_length", int),
        "num_hidden_layers": gguf.own("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.own("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": gguf.own("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": gguf.own("context_length", int),
        "rope_theta": gguf.own("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if name in ids},
    }


def _rope_scaling(gguf: GgufFile) -> dict[str, Any] | None:
    if "rope_freqs.weight" in gguf.tensors:  # Llama 3.1 and later
        return _llama3_scaling(gguf)
    kind = gguf.own("rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise gguf.unsupported(f"RoPE scaling {kind!r} cannot be imported (known: linear, yarn)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": gguf.own("rope.scaling.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.own("rope.scaling.original_context_length", int)
    return scaling


def _llama3_scaling(gguf: GgufFile) -> dict[str, Any]:
    """The released settings whose divisors of the frequencies are in the file: it holds those, not the settings."""
    import torch

    from eeinfer.ops.rope import inverse_frequencies, rotary

    found = torch.tensor(gguf.tensors["rope_freqs.weight"].data)
    theta = gguf.own("rope.freq_base", float, 10000.0)
    for factor in _LLAMA3_FACTORS:
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        divisors = inverse_frequencies(2 * len(found), theta) / rotary(2 * len(found), theta, scaling).frequencies
        if found.dtype == torch.float32 and torch.allclose(divisors, found, rtol=1e-4):
            return scaling
    raise gguf.unsupported("its RoPE scaling (tensor rope_freqs) is none of the released ones of Llama 3")


def _llama(_: GgufFile) -> dict[str, Any]:
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return named | {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _qwen2(_: GgufFile) -> dict[str, Any]:
    named = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return named | {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(_: GgufFile) -> dict[str, Any]:
    named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return named | {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _gemma2(gguf: GgufFile) -> dict[str, Any]:
    return _gemma(gguf) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": gguf.own("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": gguf.own("final_logit_softcapping", float, 30.0),
    }


def _gemma3(gguf: GgufFile) -> dict[str, Any]:
    return _gemma(gguf) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_local_base_freq": gguf.own("rope.freq_base_swa", float, 10000.0),
        "sliding_window_pattern": gguf.own("attention.sliding_window_pattern", int, 6),
    }


def _gemma(gguf: GgufFile) -> dict[str, Any]:
    hidden, heads = gguf.own("embedding_length", int), gguf.own("attention.head_count", int)
    largest = gguf.own("block_count", int) == _27B[gguf.architecture]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": gguf.own("attention.sliding_window", int),
        "query_pre_attn_scalar": hidden // heads if largest else gguf.own("attention.key_length", int, hidden // heads),
    }


ARCHITECTURES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
