"""`eeinfer convert`: pickles to safetensors, GGUF by way of the command, and nothing left where it fails."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_gguf_import import write_gguf
from tiny import load_decoder
from torch import Tensor
from typer.testing import CliRunner

from eeinfer.cli.app import app
from eeinfer.errors import EeinferError, ModelError
from eeinfer.model.convert import convert
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.loader import load_weights
from eeinfer.model.weights import stored


class Runs:
    """A pickle of this writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def pickled(source: Path, folder: Path, shards: int = 1) -> Path:
    """The model in `source` as it was published before safetensors."""
    folder.mkdir()
    for path in source.glob("*.json"):
        (folder / path.name).write_text(path.read_text())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tensors = load_file(source / "model.safetensors")
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    homes = {name: names[i % shards] for i, name in enumerate(sorted(tensors))}
    for file in names:
        torch.save({name: tensor for name, tensor in tensors.items() if homes[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def converted(source: Path, target: Path) -> Path:
    convert(source, target, dtype="bfloat16", progress=lambda *_: None)
    return target


def same_weights(a: Path, b: Path) -> None:
    decoders = [load_decoder(folder, torch.float32) for folder in (a, b)]
    first, second = (stored(decoder.weights) for decoder in decoders)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_become_the_same_model(shards: int, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source = tiny_model("gqa")
    target = converted(pickled(source, tmp_path / "old", shards), tmp_path / "new" / "model")
    assert fingerprint(target) == fingerprint(source)
    same_weights(source, target)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_text() == (source / name).read_text()
    assert (target / "chat_template.jinja").is_file()
    weights = sorted(path.name for path in target.iterdir() if "model" in path.name)
    if shards == 1:
        assert weights == ["model.safetensors"]
    else:
        assert weights == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(
            t.nbytes for t in load_file(source / "model.safetensors").values()
        )


def test_tied_matrices_and_views_come_whole(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source = tiny_model("tied-mqa")
    old = pickled(source, tmp_path / "old")
    tensors: dict[str, Tensor] = torch.load(old / "pytorch_model.bin", weights_only=True)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors[name] = tensors[name].T.contiguous().T
    torch.save(tensors, old / "pytorch_model.bin")
    same_weights(source, converted(old, tmp_path / "new"))


def test_no_code_of_a_pickle_runs(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    old, ran = pickled(tiny_model("gqa"), tmp_path / "old"), tmp_path / "ran"
    torch.save({"model.norm.weight": torch.ones(2), "extra": Runs(ran)}, old / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be read as tensors alone"):
        converted(old, tmp_path / "new")
    assert not ran.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"], "nothing is left"


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"a": 1}), pickle.dumps([1, 2])])
def test_what_is_no_pickle_of_tensors(content: bytes, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    old = pickled(tiny_model("gqa"), tmp_path / "old")
    (old / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        converted(old, tmp_path / "new")
    torch.save({"state_dict": {"a": torch.ones(1)}}, old / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no table of tensors by name"):
        converted(old, tmp_path / "new")


def test_folders_that_cannot_be_converted(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source = tiny_model("gqa")
    target = tmp_path / "new"
    sharded = pickled(source, tmp_path / "sharded", shards=2)
    (sharded / "pytorch_model-00002-of-00002.bin").unlink()
    several = pickled(source, tmp_path / "several")
    (several / "pytorch_model.bin").rename(several / "a.pth")
    (several / "b.pth").write_bytes(b"")
    full = tmp_path / "full"
    full.mkdir()
    (full / "note").touch()
    for folder, place, words in (
        (sharded, target, r"pytorch_model-00002-of-00002\.bin: missing"),
        (several, target, r"several pickles \(a\.pth, b\.pth\)"),
        (source, target, "no weights as a pickle"),
        (tmp_path / "none", target, "no such file or folder"),
        (sharded, full, "is there already"),
    ):
        with pytest.raises(ModelError, match=words):
            converted(folder, place)
        assert not target.exists()
    assert [path.name for path in full.iterdir()] == ["note"]


@pytest.mark.parametrize(("asked", "dtype"), [([], "bfloat16"), (["--dtype", "float16"], "float16")])
def test_the_command_makes_a_model_of_a_gguf_file(asked: list[str], dtype: str, tmp_path: Path) -> None:
    file, target = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "model"
    target.mkdir()  # an empty folder is no hindrance
    result = CliRunner().invoke(app, ["convert", str(file), str(target), *asked])
    assert (result.exit_code, result.stdout) == (0, f"{target}\n")
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == dtype
    assert load_decoder(target).num_layers == 2
    again = CliRunner().invoke(app, ["convert", str(file), str(target)])
    assert isinstance(again.exception, EeinferError)
    assert "is there already" in str(again.exception)


def test_old_weights_are_refused_with_the_way_out(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    old = pickled(tiny_model("gqa"), tmp_path / "old")
    with pytest.raises(ModelError, match="eeinfer convert"):
        load_weights(old, load_decoder(tiny_model("gqa")).config, torch.float32, torch.device("cpu"))
