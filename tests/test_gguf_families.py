"""GGUF files of families beyond Llama: written from a tiny model, converted back, the model is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file
from test_gguf_import import CHAT_TEMPLATE, TOKENS, add, write_gguf
from tokenizers import Tokenizer

from eeinfer.errors import ModelError
from eeinfer.model.families import model_config
from eeinfer.model.gguf_config import hf_config
from eeinfer.model.gguf_file import GgufFile
from eeinfer.model.gguf_import import import_gguf
from eeinfer.ops.rope import inverse_frequencies, rotary

# Name in the tiny checkpoint -> in GGUF, as llama.cpp's converter writes it.
LLAMA_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_PARTS = LLAMA_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WINDOWED = {"attention.key_length": 12, "attention.sliding_window": 5}
# Architecture -> the tiny model it is written from, and what its metadata says beside the sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention.key_length": 16}),
    "gemma2": ("gemma2", WINDOWED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3",
        {
            "attention.key_length": 16,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1000.0,
            "rope.freq_base_swa": 50.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 3.0,
        },
    ),
}
BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = ["\u2581", "t", "h", "e", "n", "th", "he", "the", "\u2581the", "en", "then", "\u2581t", "\u2581\u2581"]
SCORES = {"the": -3.0, "th": -1.0, "he": -2.0, "\u2581the": -4.0, "en": -0.5, "then": -9.0, "\u2581t": -8.0}


def part_names(parts: dict[str, str], name: str) -> str:
    """The name in GGUF of a tensor of the tiny checkpoint."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{parts[part]}.{kind}"


def write_family(path: Path, folder: Path, architecture: str, own: dict[str, Any]) -> Path:
    """The tiny model in `folder` as llama.cpp's converter would write it."""
    config, gemma = json.loads((folder / "config.json").read_text()), architecture.startswith("gemma")
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    names = ["t", "o", "to", *(f"token{i}" for i in range(config["vocab_size"] - 3))]
    plain = {"model": "gpt2", "pre": "qwen2", "tokens": names, "token_type": [1] * len(names), "merges": ["t o"]}
    writer = GGUFWriter(path, architecture)
    for key, value in (sizes | own).items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in (plain | {"eos_token_id": 257}).items():
        add(writer, f"tokenizer.ggml.{key}", value)
    for name, weights in load_file(folder / "model.safetensors").items():
        shifted = weights + 1 if gemma and name.endswith("norm.weight") else weights
        writer.add_tensor(part_names(GEMMA_PARTS if gemma else LLAMA_PARTS, name), shifted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", CASES)
def test_the_same_model_comes_back(architecture: str, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    variant, own = CASES[architecture]
    source = tiny_model(variant)
    file = write_family(tmp_path / "tiny.gguf", source, architecture, own)
    import_gguf(file, tmp_path / "model", progress=lambda *_: None, dtype="float32")
    expected, found = model_config(source), model_config(tmp_path / "model")
    scale = {"gemma2": 12**-0.5, "gemma3": 0.25}.get(architecture)  # that of no released size is in the file
    for name in ("windows", "rope_theta", "rope_scaling", "local_rope_theta", "qk_norm", "qkv_bias", "logit_softcap"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.names, found.tied, found.attention_scale) == (expected.names, expected.tied, scale)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", source))
    assert ours.keys() == theirs.keys()
    for name, weights in theirs.items():
        np.testing.assert_allclose(ours[name], weights, rtol=0, atol=2e-7, err_msg=name)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_their_width(architecture: str, layers: int, tmp_path: Path) -> None:
    sizes = {"embedding_length": 4608, "block_count": layers, "feed_forward_length": 8, "context_length": 64}
    sizes |= {"attention.head_count": 32, "attention.head_count_kv": 16, "attention.key_length": 128}
    other = {"attention.sliding_window": 4096, "attention.layer_norm_rms_epsilon": 1e-6}
    metadata = {f"{architecture}.{key}": value for key, value in (sizes | other).items()}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.tokens": TOKENS}
    assert hf_config(GgufFile(tmp_path, metadata, {}), "bfloat16")["query_pre_attn_scalar"] == 144


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_by_its_divisors(factor: float, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    divisors = inverse_frequencies(8, 5000.0) / rotary(8, 5000.0, scaling).frequencies
    file = write_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": divisors.numpy()})
    import_gguf(file, tmp_path / "model", progress=lambda *_: None)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["rope_scaling"] == scaling


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantisations(kind: str, tmp_path: Path) -> None:
    """Those that the library can also write; it reads more."""
    name, type_ = "blk.0.ffn_down.weight", GGMLQuantizationType[kind]
    weights = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    file = write_gguf(tmp_path / "tiny.gguf", tensors={name: weights}, quantised=(name,), kind=type_)
    import_gguf(file, tmp_path / "model", progress=lambda *_: None, dtype="float32")
    found = load_file(tmp_path / "model" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(found, dequantize(quantize(weights, type_), type_))


# SentencePiece


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """Metadata of a vocabulary with control tokens, bytes, pieces, and a user-defined run of spaces."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, *PIECES, "   ", "<end_of_turn>"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * len(PIECES), 4, 3]
    scores = [0.0] * 260 + [SCORES.get(piece, -100.0) for piece in PIECES] + [0.0, 0.0]
    found = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores}
    found |= {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items()}


def imported_pieces(tmp_path: Path, **changes: Any) -> Tokenizer:
    metadata = sentence_piece(**changes)
    size = len(metadata["tokenizer.ggml.tokens"])
    removed = {"tokenizer.ggml.merges": None, "tokenizer.chat_template": CHAT_TEMPLATE}
    embedding = np.zeros((size, 32), np.float32)
    file = write_gguf(tmp_path / "t.gguf", metadata | removed, {"token_embd.weight": embedding})
    import_gguf(file, tmp_path / "model", progress=lambda *_: None)
    return Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))


def test_pieces_merge_by_their_scores(tmp_path: Path) -> None:
    tokenizer = imported_pieces(tmp_path, add_space_prefix=False)
    # "en" has the best score, so "then" is th + en and never the + n.
    assert tokenizer.encode("then the").tokens == ["<bos>", "then", "\u2581the"]
    assert tokenizer.encode("hen").tokens == ["<bos>", "h", "en"]
    assert tokenizer.encode("é").tokens == ["<bos>", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("t   h").tokens == ["<bos>", "t", "   ", "h"]
    for text in ("then the", " two  spaces\n", "naïve 日本語", "t   h"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_space_in_front_of_the_text(tmp_path: Path) -> None:
    tokenizer = imported_pieces(tmp_path)
    assert tokenizer.encode("the").tokens == ["<bos>", "\u2581the"]
    assert tokenizer.decode(tokenizer.encode("the then").ids) == "the then"


def test_ends_of_turns_end_an_answer(tmp_path: Path) -> None:
    tokenizer = imported_pieces(tmp_path)
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    end = tokenizer.token_to_id("<end_of_turn>")
    assert generation == {"bos_token_id": 2, "eos_token_id": [1, end], "pad_token_id": 0}
    described = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert (described["add_bos_token"], described["chat_template"]) == (True, CHAT_TEMPLATE)


def test_scores_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="do not fit"):
        imported_pieces(tmp_path, scores=[0.0])
