"""What config.json may say: traits of every family, spellings, defaults, and errors that name file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_loader import GEMMA2, GPT2, QWEN2, QWEN3, config_of, refused

from eeinfer.model.families import model_config
from eeinfer.model.folder import read_json

LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}
YARN = {"factor": 2.0, "original_max_position_embeddings": 32.0, "beta_fast": 30.0, "truncate": False}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 2}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
GPT_NEO = {"architectures": ["GPTNeoForCausalLM"], "num_layers": 2, "num_heads": 4}
LONGROPE = {"short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return config_of(tmp_path)


def test_traits_of_a_plain_config(folder: Path) -> None:
    c = model_config(folder)
    assert (c.num_layers, c.hidden_size, c.intermediate_size, c.vocab_size) == (2, 8, 12, 10)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.max_position) == (4, 2, 2, 64)
    assert (c.norm_eps, c.rope_theta, c.rope_scaling) == (1e-5, 5000.0, {"rope_type": "default"})
    assert (c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm) == (False, False, False, False)
    assert (c.tied, c.dtype) == (False, "float32")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": 6}, {"head_dim": 6}),
        ({"torch_dtype": None, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": None}, {"dtype": "float32"}),
        ({"hidden_act": None, "rms_norm_eps": None}, {"norm_eps": 1e-6}),
        ({"rope_theta": None}, {"rope_theta": 10_000.0}),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7}}, {"rope_theta": 7.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7}}, {"rope_theta": 7.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 5000.0}),
        ({"architectures": ["Other", "LlamaForCausalLM"]}, {"num_layers": 2}),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE}}, {"max_position": 32}),
        (QWEN2, {"qkv_bias": True, "output_bias": False, "qk_norm": False, "head_dim": 2}),
        ({**QWEN2, "attention_bias": True}, {"output_bias": False}),  # not one of this family's keys
        ({**QWEN3, "head_dim": None}, {"qkv_bias": False, "output_bias": False, "qk_norm": True, "head_dim": 128}),
        ({**QWEN3, "attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ({**QWEN3, "max_position_embeddings": None}, {"max_position": 32768}),
        ({**QWEN3, "layer_types": ["full_attention"] * 2}, {"windows": ()}),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, {"windows": (None, 4)}),
        ({**QWEN2, "use_sliding_window": True}, {"windows": ()}),  # the first 28 layers have none
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
            {"windows": (4, 4)},
        ),
        (MISTRAL, {"windows": (4096, 4096), "head_dim": 2, "qkv_bias": False}),
        ({**MISTRAL, "sliding_window": 6}, {"windows": (6, 6)}),
        (
            GEMMA2,
            {"windows": (4096, None), "attention_softcap": 50.0, "logit_softcap": 30.0, "attention_scale": 1 / 16},
        ),
        ({**GEMMA2, "tie_word_embeddings": None}, {"tied": True, "head_dim": 256, "attention_scale": 1 / 16}),
        ({**GEMMA3, "rope_theta": None}, {"rope_theta": 1e6, "local_rope_theta": 1e4, "windows": (4096, 4096)}),
        ({**GEMMA3, "sliding_window_pattern": 2, "sliding_window": 3}, {"windows": (3, None), "logit_softcap": None}),
        ({**GEMMA3, "layer_types": ["full_attention"] * 2}, {"windows": ()}),
        (
            {
                **GEMMA3,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 9},
                    "sliding_attention": {"rope_theta": 3},
                },
            },
            {"rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "local_rope_theta": 3.0},
        ),
        (PHI3, {"rotary_dim": 2, "windows": (), "norm_eps": 1e-5}),
        ({**PHI3, "sliding_window": 5, "num_attention_heads": 1, "num_key_value_heads": 1}, {"windows": (5, 5)}),
        ({**PHI3, "rope_scaling": {"type": "su", **LONGROPE}}, {"max_position": 32}),
        (GPT2, {"intermediate_size": 32, "max_position": 1024, "tied": False, "head_dim": 2, "qkv_bias": True}),
        ({**GPT2, "tie_word_embeddings": None, "n_positions": 9}, {"tied": True, "max_position": 9}),
        ({**GPT2, "scale_attn_weights": False}, {"attention_scale": 1.0}),
        ({**GPT_NEO, "attention_types": [[["local", "global"], 1]]}, {"windows": (256, None), "attention_scale": 1.0}),
    ],
)
def test_spellings_and_defaults(folder: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = model_config(config_of(folder, **changes))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [("default", {}), ("linear", {"factor": 2.0}), ("dynamic", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)],
)
def test_rope_kinds(folder: Path, key: str, spelling: str, kind: str, values: dict[str, Any]) -> None:
    scaling = model_config(config_of(folder, **{key: {spelling: kind, **values}})).rope_scaling
    assert scaling["rope_type"] == kind
    assert values.items() <= scaling.items()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["BloomForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architecture", "LlamaForCausalLM"]),
        ({"architectures": 5}, ["architecture"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers", "'2'"]),
        ({"intermediate_size": 1.5}, ["intermediate_size", "1.5"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": -2}, ["head_dim"]),
        ({"head_dim": 3}, ["head_dim"]),  # RoPE turns pairs
        ({"hidden_size": 12, "num_attention_heads": 4}, ["head_dim"]),  # 12 / 4 = 3
        ({"rms_norm_eps": "x"}, ["rms_norm_eps"]),
        ({"rope_theta": "x"}, ["rope_theta"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"rope_scaling": {"type": "mrope", "factor": 2}}, ["'mrope'", "linear"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["'dynamic'", "factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, ["beta_fast"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["short_factor"]),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, "x"]}}, ["short_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["'linear'", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["'llama3'", "low_freq_factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, ["low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"rope_scaling": ["linear"]}, ["rope_scaling"]),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": "1"}, ["max_window_layers", "'1'"]),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 0}, ["sliding_window", "0"]),
        ({**QWEN3, "use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ({**QWEN3, "use_sliding_window": True, "layer_types": ["chunked"] * 2}, ["layer_types", "'chunked'"]),
        ({**MISTRAL, "sliding_window": -1}, ["sliding_window", "-1"]),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({**QWEN3, "hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({**GEMMA3, "hidden_activation": "silu"}, ["hidden_activation", "'silu'"]),
        ({**GEMMA3, "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, ["'linear'"]),
        ({**PHI3, "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ({**PHI3, "rope_scaling": {"type": "su", "short_factor": [1, 2, 3]}}, ["short_factor", "1 numbers"]),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ({**GPT2, "n_head": 3}, ["8", "3 heads"]),
        ({**GPT2, "activation_function": "tanh"}, ["activation_function", "'tanh'"]),
        ({**GPT_NEO, "attention_types": [[["global"], 1]]}, ["attention_types", "2 layers"]),
        ({**GPT_NEO, "attention_types": [3]}, ["attention_types", "[3]"]),
    ],
)
def test_config_errors_name_file_and_key(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    refused(lambda: model_config(config_of(folder, **changes)), str(folder / "config.json"), *words)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    refused(lambda: read_json(folder / "config.json"), str(folder / "config.json"))


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(lambda: model_config(folder), str(folder / "config.json"), "no such file")
