"""Fingerprints: what counts as the same model, what does not, and damaged files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eeinfer.errors import ModelError
from eeinfer.model.fingerprint import SAMPLE_BYTES, fingerprint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
LARGE = 1_000_000  # bytes of tensor "b", more than three samples


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(0, 256, LARGE).astype(np.uint8),
        "c": rng.standard_normal(7).astype(np.float16),
    }


def save(folder: Path, config: dict[str, Any], shards: list[dict[str, np.ndarray]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    places: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(tmp_path / "base", CONFIG, [tensors()])


def test_form(base: Path) -> None:
    assert fingerprint(base) == fingerprint(base)
    prefix, digest = fingerprint(base).split(":")
    assert prefix == "sha256"
    assert len(bytes.fromhex(digest)) == 32


def test_shards_do_not_matter(tmp_path: Path, base: Path) -> None:
    t = tensors()
    folder = save(tmp_path / "shards", CONFIG, [{"c": t["c"]}, {"b": t["b"]}, {"a": t["a"]}])
    assert fingerprint(folder) == fingerprint(base)


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "/somewhere/else", "transformers_version": "5.0.0", "use_cache": False},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"rope_theta": 10000},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"head_dim": 16, "num_key_value_heads": 4},
        {"attention_bias": False, "tie_word_embeddings": False, "rope_scaling": None},
        {"max_position_embeddings": 99},
        {"sliding_window": 64, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
        {"max_window_layers": 9},
        {"final_logit_softcapping": None},
    ],
)
def test_spelling_and_notes_in_the_config_do_not_matter(tmp_path: Path, base: Path, change: dict[str, Any]) -> None:
    assert fingerprint(save(tmp_path / "other", CONFIG | change, [tensors()])) == fingerprint(base)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"num_attention_heads": 8},
        {"num_key_value_heads": 2},
        {"tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"sliding_window": 64},
        {"sliding_window": 64, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_local_base_freq": 10000.0},
        {"partial_rotary_factor": 0.5},
        {"query_pre_attn_scalar": 64},
        {"n_head": 3},
    ],
)
def test_what_decides_the_numbers_matters(tmp_path: Path, base: Path, change: dict[str, Any]) -> None:
    assert fingerprint(save(tmp_path / "other", CONFIG | change, [tensors()])) != fingerprint(base)


def test_gemmas_two_bases_have_two_spellings(tmp_path: Path) -> None:
    old = CONFIG | {"rope_local_base_freq": 100, "rope_scaling": {"rope_type": "linear", "factor": 2}}
    whole = {"rope_type": "linear", "factor": 2.0, "rope_theta": CONFIG["rope_theta"]}
    nested = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    new = CONFIG | {"rope_theta": None, "rope_parameters": nested}
    found = [fingerprint(save(tmp_path / name, c, [tensors()])) for name, c in (("old", old), ("new", new))]
    assert found[0] == found[1]


def test_rope_scaling_has_two_spellings(tmp_path: Path) -> None:
    old = CONFIG | {"rope_scaling": {"type": "linear", "factor": 2}}
    new = CONFIG | {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
    }
    assert fingerprint(save(tmp_path / "old", old, [tensors()])) == fingerprint(
        save(tmp_path / "new", new, [tensors()])
    )


@pytest.mark.parametrize("byte", [0, SAMPLE_BYTES - 1, LARGE // 2, LARGE - SAMPLE_BYTES, LARGE - 1])
def test_a_changed_byte_in_a_sample_matters(tmp_path: Path, base: Path, byte: int) -> None:
    changed = tensors()
    changed["b"][byte] ^= 1
    assert fingerprint(save(tmp_path / "other", CONFIG, [changed])) != fingerprint(base)


def test_only_samples_of_a_large_tensor_are_read(tmp_path: Path, base: Path) -> None:
    changed = tensors()
    changed["b"][SAMPLE_BYTES] ^= 1
    assert fingerprint(save(tmp_path / "other", CONFIG, [changed])) == fingerprint(base)


@pytest.mark.parametrize("change", ["rename", "reshape", "retype", "value"])
def test_tensors_matter(tmp_path: Path, base: Path, change: str) -> None:
    changed = tensors()
    if change == "rename":
        changed["d"] = changed.pop("c")
    elif change == "reshape":
        changed["a"] = changed["a"].reshape(5, 3)
    elif change == "retype":
        changed["c"] = changed["c"].view(np.int16)
    else:
        changed["c"][-1] += 1
    assert fingerprint(save(tmp_path / "other", CONFIG, [changed])) != fingerprint(base)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:5],
        lambda data: data[:50],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"dtype"', b'"dtypo"', 1),
    ],
)
def test_damaged_weights_are_refused_by_name(base: Path, damage: Any) -> None:
    file = base / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors: .*fetch the model again"):
        fingerprint(base)


def test_a_pickle_is_refused(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle \(pytorch_model\.bin\).*refused.*convert"):
        fingerprint(base)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    t = tensors()
    folder = save(tmp_path / "shards", CONFIG, [{"c": t["c"]}, {"a": t["a"], "b": t["b"]}])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: missing"):
        fingerprint(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        fingerprint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        fingerprint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        fingerprint(folder)


def test_a_tensor_that_occurs_twice_is_named(tmp_path: Path) -> None:
    t = tensors()
    folder = save(tmp_path / "shards", CONFIG, [{"a": t["a"], "c": t["c"]}, {"a": t["a"], "b": t["b"]}])
    with pytest.raises(ModelError, match=r"tensor a is also in model-00001-of-00002\.safetensors"):
        fingerprint(folder)


def test_exit_heads_beside_the_weights_do_not_matter(base: Path) -> None:
    before = fingerprint(base)
    save_file({"exits.0.norm.weight": np.ones(4, np.float32)}, base / "exit_heads.safetensors")
    assert fingerprint(base) == before


def test_torch_is_not_imported() -> None:
    code = "import sys, eeinfer.model.fingerprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
