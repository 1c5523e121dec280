"""`eeinfer inspect`: figures from headers, held against the model in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_llm import Run, runner
from tiny import VARIANTS, load_decoder

from eeinfer.engine.build import locate
from eeinfer.exits.files import TENSORS_NAME, Base, HeadsFile, save_heads
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model import loader
from eeinfer.model.families import model_config
from eeinfer.model.fingerprint import fingerprint
from eeinfer.model.weights import stored


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    found = runner(monkeypatch, capsys)
    monkeypatch.setattr("eeinfer.engine.inspection.locate", locate)  # no stand-in for models that are not there
    return found


@pytest.fixture
def inspected(run: Run) -> Callable[..., dict[str, Any]]:
    def inspect(*arguments: str | Path) -> dict[str, Any]:
        ended = run("inspect", "--json", *arguments)
        assert ended.code == 0, ended.err
        return json.loads(ended.out, parse_constant=pytest.fail)

    return inspect


def with_heads(folder: Path, model: Path) -> Path:
    """Random heads of every form for the tiny model."""
    specs = (
        ExitSpec(2, "linear", rank=4, gate=GateSpec(8)),
        ExitSpec(3, "norm"),
        ExitSpec(4, "mlp", intermediate=16, tied=False),
    )
    config = model_config(model)
    shapes = [spec.tensor_shapes(config.hidden_size, config.vocab_size) for spec in specs]
    tensors = tuple({name: torch.ones(shape) for name, shape in own.items()} for own in shapes)
    base = Base("tiny", fingerprint(model), config.hidden_size, config.vocab_size, config.num_layers)
    folder.mkdir()
    save_heads(folder, base, HeadsFile(specs, tensors), header={}, results=[{}, {}, {}])
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_are_those_of_the_model_in_memory(
    tiny_model: Callable[[str], Path], inspected: Callable[..., dict[str, Any]], variant: str
) -> None:
    folder = tiny_model(variant)
    found = inspected(folder, "--block-size", "4", "--device", "cpu")
    tensors = stored(load_decoder(folder, torch.float32).weights)
    counts = found["parameters"]
    assert counts["total"] == sum(tensor.numel() for tensor in tensors.values())
    positions = tensors["positions"].numel() if "positions" in tensors else 0
    assert counts["embedding"] == tensors["embedding"].numel() + positions
    assert counts["lm_head"] == (tensors["lm_head"].numel() if "lm_head" in tensors else 0)
    norm = [tensors[name].numel() for name in ("final_norm", "final_norm_bias") if name in tensors]
    assert counts["other"] == sum(norm)
    assert found["model"]["fingerprint"] == fingerprint(folder)
    assert found["model"]["num_layers"] == 6
    memory = found["memory"]
    assert memory["weight_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    config = model_config(folder)
    assert memory["kv_bytes_per_token"] == 2 * 6 * config.num_kv_heads * config.head_dim * 4


def test_tokens_that_fit_leave_room_for_the_weights(
    tiny_model: Callable[[str], Path], inspected: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("gqa")
    memory = inspected(folder, "--device", "cpu")["memory"]
    block = 16 * memory["kv_bytes_per_token"]
    free = memory["weight_bytes"] + 2 * 25 * block + 1  # half of the rest is for the cache
    monkeypatch.setattr("eeinfer.engine.inspection.free_memory", lambda _: free)
    memory = inspected(folder, "--device", "cpu")["memory"]
    assert (memory["free_bytes"], memory["tokens"], memory["full_contexts"]) == (free, 25 * 16, 25 * 16 // 160)
    assert inspected(folder, "--device", "cpu", "--num-blocks", "3")["memory"]["tokens"] == 48
    assert inspected(folder, "--device", "cpu", "--num-blocks", "99")["memory"]["tokens"] == 400
    monkeypatch.setattr("eeinfer.engine.inspection.free_memory", lambda _: 1)
    assert inspected(folder, "--device", "cpu")["memory"]["tokens"] == 0


def test_no_weights_are_read(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    inspected: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = with_heads(tmp_path / "heads", tiny_model("gqa"))
    (heads / TENSORS_NAME).unlink()
    monkeypatch.setattr(loader, "safe_open", pytest.fail)
    exits = inspected(tiny_model("gqa"), "--heads", heads, "--threshold", "0.5,inf,-inf")["exits"]
    assert exits["heads"] == str(heads)
    assert [(one["layers_executed"], one["kind"], one["gate"], one["threshold"]) for one in exits["exits"]] == [
        (2, "linear", {"width": 8, "tokens": None}, 0.5),
        (3, "norm", None, None),
        (4, "mlp", None, "-inf"),
    ]
    linear, gate, norm = 2 * 4 * 32, 8 * 32 + 8 + 8 + 1, 32
    assert exits["exits"][0]["parameters"] == linear + gate + norm
    assert exits["exits"][1]["parameters"] == norm
    assert exits["exits"][2]["parameters"] == 32 * 32 + 3 * 16 * 32 + 32 + norm + 272 * 32


def test_exits_without_heads_are_those_asked_for(
    tiny_model: Callable[[str], Path], inspected: Callable[..., dict[str, Any]]
) -> None:
    exits = inspected(tiny_model("gqa"), "--exits", "2,4", "--threshold", "0.5")["exits"]
    assert exits["heads"] is None
    assert [(one["layers_executed"], one["kind"]) for one in exits["exits"]] == [(2, "shared"), (4, "shared")]


CALIBRATION = """
[exits]
layers = [2, 4]
threshold = [0.7, 0.6]
measure = "max-prob"
completion = "propagate"

[calibration]
certified = true
reason = ""
policy = "sha256:0"
model = "{model}"
heads = "none"
dtype = "float32"
strategy = "split"
max_tokens = 256
n = 300
tie = 0.05
data = "sha256:1"
seed = 0
version = "0.1.0"
tolerance = 0.02
confidence = 0.95
"""


def test_a_calibration_is_shown_and_whether_it_holds(
    tiny_model: Callable[[str], Path], tmp_path: Path, inspected: Callable[..., dict[str, Any]], run: Run
) -> None:
    shutil.copytree(tiny_model("gqa"), model := tmp_path / "model")
    file = model / "calibration.toml"
    file.write_text(CALIBRATION.format(model=fingerprint(model)))
    shown = inspected(model)["calibration"]
    assert (shown["certified"], shown["tolerance"], shown["confidence"], shown["n"]) == (True, 0.02, 0.95, 300)
    assert shown["reason"] == "the file was changed after it was made"
    assert str(file) in shown["file"]
    assert "does not hold: the file was changed" in run("inspect", model).out
    assert inspected(tiny_model("gqa"))["calibration"] is None


def test_the_text_says_what_the_json_does(tiny_model: Callable[[str], Path], tmp_path: Path, run: Run) -> None:
    model = tiny_model("gqa")
    heads = with_heads(tmp_path / "heads", model)
    out = run("inspect", model, "--heads", heads, "--threshold", "0.5", "--measure", "margin", "--device", "cpu").out
    for words in (
        str(model),
        fingerprint(model),
        "LlamaForCausalLM (llama)",
        "4 heads of 8, 2 KV heads",
        "after 2 layers: linear, rank 4, gate of 8",
        "after 4 layers: mlp, own vocabulary matrix, 11.3 k parameters, leaves at margin >= 0.5",
        "768 bytes a token",
        "none: thresholds carry no guarantee",
    ):
        assert words in out


def test_a_model_that_is_not_here_is_an_error(run: Run) -> None:
    ended = run("inspect", "org/none")
    assert (ended.code, ended.out) == (2, "")
    assert "eeinfer pull org/none" in ended.err
