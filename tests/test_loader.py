"""Model folders: what config.json may say, and weights of which every tensor is accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eeinfer.errors import ModelError
from eeinfer.model.families import model_config
from eeinfer.model.folder import weight_files
from eeinfer.model.loader import load_weights
from eeinfer.model.weights import Weights, destinations, empty_weights, stored

CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 10,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 4}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 2}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 4, "n_layer": 2}
# What config.json says of each trait of the tensors.
TRAITS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "qkv_bias": QWEN2,
    "qk_norm": QWEN3,
}
Tensors = dict[str, Tensor]


def config_of(folder: Path, **changes: Any) -> Path:
    """Write config.json; a change to None removes the key."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def shapes(
    *,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, written down independently of the loader."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,)}
    if not tied:
        found["lm_head.weight"] = (10, 8)
    projections = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    mlp = {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}
    for layer in range(2):
        p = f"model.layers.{layer}."
        found |= {p + "input_layernorm.weight": (8,), p + "post_attention_layernorm.weight": (8,)}
        found |= {f"{p}self_attn.{n}_proj.weight": shape for n, shape in projections.items()}
        found |= {f"{p}mlp.{n}_proj.weight": shape for n, shape in mlp.items()}
        if attention_bias:
            found |= {f"{p}self_attn.{n}_proj.bias": shape[:1] for n, shape in projections.items()}
        if qkv_bias:
            found |= {f"{p}self_attn.{n}_proj.bias": projections[n][:1] for n in "qkv"}
        if qk_norm:
            found |= {p + "self_attn.q_norm.weight": (2,), p + "self_attn.k_norm.weight": (2,)}
        if mlp_bias:
            found |= {f"{p}mlp.{n}_proj.bias": shape[:1] for n, shape in mlp.items()}
    return found


def tensors(**traits: bool) -> Tensors:
    """Each element differs from all others, so that any mix-up shows."""
    found, start = {}, 0
    for name, shape in shapes(**traits).items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / SINGLE)
    return config_of(tmp_path)


def shard(folder: Path, weight_map: dict[str, str] | None = None) -> list[Path]:
    """Split model.safetensors in two, alternately."""
    whole = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    homes = {name: names[i % 2] for i, name in enumerate(sorted(whole))}
    for file in names:
        save_file({name: whole[name] for name, home in homes.items() if home == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map or homes}), encoding="utf-8")
    return [folder / name for name in names]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, model_config(folder), dtype, CPU)


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    found = load_file(folder / SINGLE)
    change(found)
    save_file(found, folder / SINGLE)


def refused(action: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        action()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


# Weights


def expect(weights: Weights, source: Tensors) -> None:
    for layer in range(2):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            own = {n: source.get(f"{p}self_attn.{n}_proj.{kind}") for n in "qkvo"}
            own |= {n: source.get(f"{p}mlp.{n}_proj.{kind}") for n in ("gate", "up", "down")}
            for stack, names in (("qkv", "qkv"), ("output", "o"), ("gate_up", ("gate", "up")), ("down", ("down",))):
                parts = [own[name] for name in names]
                found = getattr(weights, stack if kind == "weight" else f"{stack}_bias")
                if parts[0] is None:
                    assert found is None
                else:
                    assert torch.equal(found[layer], torch.cat([part for part in parts if part is not None]))
        assert torch.equal(weights.attention_norm[layer], source[p + "input_layernorm.weight"])
        assert torch.equal(weights.mlp_norm[layer], source[p + "post_attention_layernorm.weight"])
        for stack, name in (("q_norm", "self_attn.q_norm.weight"), ("k_norm", "self_attn.k_norm.weight")):
            if (norms := getattr(weights, stack)) is None:
                assert p + name not in source
            else:
                assert torch.equal(norms[layer], source[p + name])
    assert torch.equal(weights.embedding, source["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, source["model.norm.weight"])


@pytest.mark.parametrize("traits", [(), *((trait,) for trait in TRAITS), ("qk_norm", "attention_bias", "tied")])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_finds_its_place(tmp_path: Path, traits: tuple[str, ...], *, sharded: bool) -> None:
    source = tensors(**dict.fromkeys(traits, True))
    save_file(source, tmp_path / SINGLE)
    for_config: dict[str, Any] = {}
    for trait in traits:
        for_config |= TRAITS[trait]
    config_of(tmp_path, **for_config)
    if sharded:
        shard(tmp_path)
    weights = load(tmp_path)
    expect(weights, source)
    if "tied" in traits:
        assert weights.lm_head is weights.embedding
    else:
        assert torch.equal(weights.lm_head, source["lm_head.weight"])
    assert sorted(name for name, _ in destinations(model_config(tmp_path), weights)) == sorted(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_take_the_type_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    source = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    save_file(source, config_of(tmp_path) / SINGLE)
    weights = load(tmp_path, dtype)
    expect(weights, {name: tensor.to(dtype) for name, tensor in source.items()})
    assert weights.qkv.dtype is weights.lm_head.dtype is dtype


def test_a_tied_model_may_bring_its_head_twice(folder: Path) -> None:
    config_of(folder, tie_word_embeddings=True)
    weights = load(folder)
    assert weights.lm_head is weights.embedding


def test_old_gpt2_checkpoints_lack_the_prefix_and_bring_masks(tmp_path: Path) -> None:
    config = GPT2 | {"vocab_size": 10, "n_positions": 6, "n_inner": 12, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    empty = empty_weights(model_config(tmp_path), torch.float32, CPU)
    source = {
        name.removeprefix("transformer."): torch.rand(view.shape)
        for name, view in destinations(model_config(tmp_path), empty)
    }
    save_file(source | {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}, tmp_path / SINGLE)
    weights = load(tmp_path)
    assert torch.equal(weights.embedding, source["wte.weight"])
    assert torch.equal(weights.qkv[1], source["h.1.attn.c_attn.weight"].T)
    assert torch.equal(stored(weights)["qkv_bias"][1], source["h.1.attn.c_attn.bias"])


def test_gains_beside_one_keep_their_digits(tmp_path: Path) -> None:
    """1 + 0.0117 in bfloat16 would be 1.0078."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | GEMMA2))
    config = model_config(tmp_path)
    source = {
        name: torch.full(view.shape, 0.01171875, dtype=torch.bfloat16)
        for name, view in destinations(config, empty_weights(config, torch.bfloat16, CPU))
    }
    save_file(source, tmp_path / SINGLE)
    weights = load(tmp_path, torch.bfloat16)
    for gain in (weights.final_norm, weights.attention_norm, weights.post_mlp_norm):
        assert gain is not None
        assert gain.dtype is torch.float32
        assert (gain == 1.01171875).all()
    assert (weights.qkv == 0.01171875).all()
    assert weights.qkv.dtype is torch.bfloat16


def test_derived_tensors_of_old_checkpoints_are_ignored(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}))
    expect(load(folder), tensors())


@pytest.mark.parametrize("name", sorted(shapes(attention_bias=True, mlp_bias=True)))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    source = tensors(attention_bias=True, mlp_bias=True)
    del source[name]
    save_file(source, config_of(tmp_path, attention_bias=True, mlp_bias=True) / SINGLE)
    refused(lambda: load(tmp_path), str(tmp_path), f"tensor {name} is missing", "1 in all")


@pytest.mark.parametrize(
    ("trait", "name"),
    [
        ("qk_norm", "model.layers.0.self_attn.q_norm.weight"),
        ("qk_norm", "model.layers.1.self_attn.k_norm.weight"),
        ("qkv_bias", "model.layers.1.self_attn.v_proj.bias"),
    ],
)
def test_a_missing_tensor_of_a_family_is_named(tmp_path: Path, trait: str, name: str) -> None:
    source = tensors(**{trait: True})
    del source[name]
    save_file(source, config_of(tmp_path, **TRAITS[trait]) / SINGLE)
    refused(lambda: load(tmp_path), str(tmp_path), f"tensor {name} is missing", "1 in all")


@pytest.mark.parametrize(
    ("trait", "name"),
    [
        ("tied", "model.layers.0.self_attn.q_norm.weight"),
        ("qk_norm", "model.layers.0.self_attn.q_proj.bias"),
        ("qkv_bias", "model.layers.0.self_attn.o_proj.bias"),
    ],
)
def test_a_tensor_of_another_family_is_unexpected(tmp_path: Path, trait: str, name: str) -> None:
    save_file(tensors(**{trait: True}) | {name: torch.ones(8)}, config_of(tmp_path, **TRAITS[trait]) / SINGLE)
    refused(lambda: load(tmp_path), str(tmp_path / SINGLE), f"unexpected tensor {name}")


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra", "embed_tokens.weight"],
)
def test_an_unexpected_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda t: t.update({name: torch.ones(8)}))
    refused(lambda: load(folder), str(folder / SINGLE), f"unexpected tensor {name}")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.1.self_attn.k_proj.weight", (8, 8), "(4, 8)"),
        ("model.layers.1.mlp.down_proj.weight", (12, 8), "(8, 12)"),
        ("model.norm.weight", (1,), "(8,)"),  # must not be broadcast
        ("model.norm.weight", (1, 8), "(8,)"),
        ("lm_head.weight", (11, 8), "(10, 8)"),
    ],
)
def test_a_wrong_shape_is_named(folder: Path, name: str, shape: tuple[int, ...], wanted: str) -> None:
    edit(folder, lambda t: t.update({name: torch.ones(shape)}))
    refused(lambda: load(folder), str(folder / SINGLE), name, str(shape), wanted)


def test_a_tensor_in_two_shards_is_named_with_both(folder: Path) -> None:
    files = shard(folder)
    first, second = (load_file(file) for file in files)
    name = min(first)
    save_file(second | {name: first[name]}, files[1])
    refused(lambda: load(folder), f"tensor {name}", str(files[0]), str(files[1]))


def test_a_missing_shard_is_named(folder: Path) -> None:
    files = shard(folder)
    files[1].unlink()
    refused(lambda: load(folder), str(files[1]), INDEX)


def test_files_that_the_index_does_not_name_are_left_alone(folder: Path) -> None:
    files = shard(folder)
    save_file({"junk": torch.ones(1)}, folder / "adapter.safetensors")
    assert weight_files(folder) == files
    expect(load(folder), tensors())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"weight_map": []}', '{"weight_map": {"x": 5}}', '{"weight_map": null}']
)
def test_a_malformed_index_is_named(folder: Path, text: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(text, encoding="utf-8")
    refused(lambda: load(folder), str(folder), INDEX)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 0.9999])
def test_a_truncated_file_is_named(folder: Path, share: float) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[: int(share * len(whole))])
    refused(lambda: load(folder), str(folder / SINGLE), "fetch the model again")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / SINGLE).rename(folder / name)
    refused(lambda: load(folder), name, "pickle", "safetensors")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    refused(lambda: load(folder), str(folder), SINGLE)
