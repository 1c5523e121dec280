"""GGUF import, on tiny files written with the gguf library: layout, values, tokenizer, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from eeinfer.errors import ModelError
from eeinfer.model.gguf_import import import_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
BOS, EOS, UNK, THINK = 0, 1, 2, 3
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ .", "' s"]
WORD = "xyz"  # in the vocabulary, but no merge leads to it
TOKENS = ["<s>", "</s>", "<unk>", "<think>", *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), WORD]
ID = {token: i for i, token in enumerate(TOKENS)}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

METADATA: dict[str, Any] = {
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(TOKENS) - 4)],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
    "tokenizer.ggml.unknown_token_id": UNK,
    "tokenizer.ggml.padding_token_id": EOS,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}


def make_tensors() -> dict[str, np.ndarray]:
    """Float32 weights whose values are exact in bfloat16."""
    rng = np.random.default_rng(0)
    norm, square, kv = (HIDDEN,), (HEADS * HEAD_DIM, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN)
    layer: dict[str, tuple[int, ...]] = {"attn_norm": norm, "attn_q": square, "attn_k": kv, "attn_v": kv}
    layer |= {"attn_output": square, "ffn_norm": norm, "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    layer |= {"ffn_down": (HIDDEN, INNER)}
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: rng.integers(-127, 128, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {bool: writer.add_bool, int: writer.add_uint32}
    kinds |= {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    architecture: str = "llama",
    quantised: tuple[str, ...] = (),
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> Path:
    """A tiny model; `metadata` and `tensors` replace entries, or leave them out where the value is None."""
    writer = GGUFWriter(path, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        if value is not None:
            add(writer, key, value)
    for name, weights in (make_tensors() | (tensors or {})).items():
        if weights is not None and name in quantised:
            writer.add_tensor(name, quantize(weights, kind), raw_dtype=kind)
        elif weights is not None:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def imported(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "model"
    import_gguf(write_gguf(tmp_path / "tiny.gguf", **changes), folder, progress=lambda *_: None)
    return folder


def load(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118
        return {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118


def encode(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def rotate_neighbours(x: np.ndarray, position: int) -> np.ndarray:
    """The rotation of ggml, on [heads, head_dim]: elements 2i and 2i + 1 are one complex number."""
    angles = position * 5000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def rotate_halves(x: np.ndarray, position: int) -> np.ndarray:
    """Hugging Face's rotation: element i goes with i + head_dim / 2."""
    angles = np.tile(position * 5000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM), 2)
    swapped = np.concatenate([-x[:, HEAD_DIM // 2 :], x[:, : HEAD_DIM // 2]], axis=1)
    return np.asarray(x * np.cos(angles) + swapped * np.sin(angles))


def scores(wq: np.ndarray, wk: np.ndarray, rotate: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Attention scores [heads] of a query at position 11 with a key at position 4, grouped query heads."""
    x, y = np.random.default_rng(1).standard_normal((2, HIDDEN))
    q = rotate((wq.astype(np.float64) @ x).reshape(HEADS, HEAD_DIM), 11)
    k = rotate((wk.astype(np.float64) @ y).reshape(KV_HEADS, HEAD_DIM), 4)
    return np.asarray((q * k.repeat(HEADS // KV_HEADS, axis=0)).sum(axis=1))


def test_attention_scores_survive_the_change_of_rotary_layout(tmp_path: Path) -> None:
    source, weights = make_tensors(), load(imported(tmp_path))
    for i in range(LAYERS):
        wq, wk = source[f"blk.{i}.attn_q.weight"], source[f"blk.{i}.attn_k.weight"]
        attention = f"model.layers.{i}.self_attn"
        new = (weights[f"{attention}.q_proj.weight"], weights[f"{attention}.k_proj.weight"])
        expected = scores(wq, wk, rotate_neighbours)
        np.testing.assert_allclose(scores(*new, rotate_halves), expected, rtol=1e-12)
        assert not np.allclose(scores(wq, wk, rotate_halves), expected)  # the rows had to move


def test_the_other_tensors_keep_their_values_and_places(tmp_path: Path) -> None:
    quantised = ("token_embd.weight", "blk.1.ffn_down.weight")
    source, weights = make_tensors(), load(imported(tmp_path, quantised=quantised))
    assert len(weights) == 2 + 9 * LAYERS
    pairs = {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for name, original in pairs.items():
        np.testing.assert_array_equal(weights[name], source[original], err_msg=name)
    for name, original in (("model.embed_tokens", quantised[0]), ("model.layers.1.mlp.down_proj", quantised[1])):
        decoded = dequantize(quantize(source[original], GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
        np.testing.assert_allclose(weights[f"{name}.weight"], decoded, rtol=2**-8)  # bfloat16: 8 significant bits
        assert not np.array_equal(decoded, source[original])


def test_config_of_a_tied_model(tmp_path: Path) -> None:
    folder = imported(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": HEAD_DIM, "vocab_size": len(TOKENS)}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    expected = (
        sizes
        | ids
        | {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
    )
    assert {key: config[key] for key in expected} == expected
    assert json.loads((folder / "generation_config.json").read_text()) == ids


def test_an_output_matrix_makes_the_model_untied(tmp_path: Path) -> None:
    head = make_tensors()["token_embd.weight"] + 1
    folder = imported(tmp_path, tensors={"output.weight": head})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load(folder)["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("kind", "extra", "expected"),
    [("linear", {}, {}), ("yarn", {"original_context_length": 32}, {"original_max_position_embeddings": 32})],
)
def test_rope_scaling(tmp_path: Path, kind: str, extra: dict[str, int], expected: dict[str, int]) -> None:
    metadata = {f"llama.rope.scaling.{key}": value for key, value in {"type": kind, "factor": 4.0, **extra}.items()}
    config = json.loads((imported(tmp_path, metadata=metadata) / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": kind, "factor": 4.0, **expected}


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "the 123", ["t", "he", "Ġ", "1", "2", "3"]),
        ("gpt-2", "the 123.", ["t", "he", "Ġ", "123", "."]),
        ("gpt-2", "a  .", ["a", "Ġ", "Ġ."]),
        ("default", "a  .", ["a", "Ġ", "Ġ", "."]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "IT'S xyz", ["I", "T", "'", "S", "Ġ", "x", "y", "z"]),
        ("llama-bpe", "xyz", ["xyz"]),  # ignore_merges: a whole word of the vocabulary stays whole
        ("gpt-2", "xyz", ["x", "y", "z"]),
        ("gpt-2", "it's é the", ["i", "t", "'s", "Ġ", "Ã", "©", "Ġthe"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, tokens: list[str]) -> None:
    folder = imported(tmp_path, metadata={"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    assert encode(folder, text) == [ID[token] for token in tokens]


def test_special_tokens_and_round_trip(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(imported(tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode("<s>the<think> 1</s>").ids
    assert ids == [BOS, ID["t"], ID["he"], THINK, ID["Ġ"], ID["1"], EOS]
    assert tokenizer.decode(ids) == "the<think> 1"  # control tokens are special, user-defined ones are text
    for text in ("  two  spaces\n\ttabs ", "naïve 日本語 👍🏽", "def f(x):\n    return x**2", "e\u0301 is not é"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("metadata", "adds"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos(tmp_path: Path, metadata: dict[str, Any], adds: bool) -> None:
    folder = imported(tmp_path, metadata=metadata)
    assert encode(folder, "h") == ([BOS] if adds else []) + [ID["h"]]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is adds
    assert [config[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == ["<s>", "</s>", "</s>", "<unk>"]
    assert config["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "phi2"}, "architecture 'phi2' cannot be imported .known: llama, qwen2"),
        ({"metadata": {"llama.block_count": None}}, "llama.block_count is missing"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 2]}}, "head_count_kv is a list"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "rope.dimension_count is not the head size 8"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "RoPE scaling 'longrope'"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "tokenizer 't5'"),
        (
            {"metadata": {"tokenizer.ggml.pre": "tekken"}},
            "'tekken', known are default, gpt-2, llama-bpe, qwen2",
        ),
        ({"metadata": {"tokenizer.ggml.pre": None}}, "tokenizer.ggml.pre is missing"),
        ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "do not fit"),
        ({"metadata": {"tokenizer.ggml.merges": ["x notthere"]}}, "do not fit"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": len(TOKENS)}}, "outside the vocabulary"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "blk.1.ffn_up.weight is missing"),
        ({"tensors": {"blk.1.ffn_up.weight": np.zeros((8, 32), np.float32)}}, r"shape \(8, 32\).* \(64, 32\)"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}}, "blk.0.attn_q.bias belongs to no llama model"),
        ({"tensors": {"rope_freqs.weight": np.ones(4, np.float32)}}, "rope_freqs. is none of the released"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        imported(tmp_path, **changes)
    assert str(tmp_path / "tiny.gguf") in str(raised.value)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.01, 0.2, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ModelError, match=r"cut\.gguf: not a whole GGUF file"):
        import_gguf(cut, tmp_path / "model", progress=lambda *_: None)
    assert not (tmp_path / "model").exists()


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "model", progress=lambda *_: None)


def test_progress_counts_tensors(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    calls: list[tuple[str, int, int]] = []
    import_gguf(source, tmp_path / "model", progress=lambda *call: calls.append(call))
    total = 2 + 9 * LAYERS
    assert calls == [("dequantising", done, total) for done in range(total + 1)]
