"""Distillation as a whole: it makes heads better, goes on after a kill, and ends in heads that serve with gates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from filelock import FileLock
from safetensors.torch import load_file

from eeinfer import LLM, EeinferError, Request, SamplingParams
from eeinfer.config.load import load_settings
from eeinfer.engine.prompt_file import read_prompt_file
from eeinfer.engine.prompt_id import prompt_id
from eeinfer.errors import ConfigError
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.training import distill as distill_module
from eeinfer.training.distill import distill
from eeinfer.training.modules import TrainableHead, initial_tensors
from eeinfer.training.options import Options
from eeinfer.training.traces import Answered, hidden_states
from eeinfer.training.tune import Tuned, tune

EXITS = (2, 4)
QUICK = Options(width=24, epochs=3, lr=3e-3, batch_tokens=64, candidates=64, gate_width=8, gate_tokens=50)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def data(tiny_decoder: Callable[..., Decoder]) -> dict[str, torch.Tensor]:
    decoder = tiny_decoder("gqa", torch.float32)
    rows = torch.randint(0, 250, (60, 40), generator=torch.Generator().manual_seed(3)).tolist()
    groups = list(hidden_states(decoder, [Answered("", tuple(row), 0) for row in rows], [*EXITS, 6]))
    states = torch.stack([torch.cat(parts) for parts in zip(*groups, strict=True)])
    return {"train": states[:, :2000], "dev": states[:, 2000:]}


def trained(
    decoder: Decoder, data: dict[str, torch.Tensor], folder: Path, note: Callable[[str], None], options: Options = QUICK
) -> list[dict[str, torch.Tensor]]:
    specs = [ExitSpec(n, "mlp", intermediate=24) for n in EXITS]
    modules = [TrainableHead(s, initial_tensors(decoder, s, torch.eye(32)), 1e-5) for s in specs]
    return distill(Accelerator(cpu=True, device_placement=False), decoder, modules, data, options, 0, folder, note)


def dev_figures(note: str) -> list[tuple[float, float]]:
    """KL and agreement of each exit in a line of progress."""
    return [
        (float(words.split()[1]), float(words.split("(")[1].rstrip("%)")))
        for words in note.partition("by exit: ")[2].split(", ")
    ]


def test_training_brings_heads_closer_to_the_model(
    tiny_decoder: Callable[..., Decoder], data: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    notes: list[str] = []
    trained(tiny_decoder("gqa", torch.float32), data, tmp_path, notes.append)
    assert "step 0 of 94" in notes[0]
    for (kl, agreement), (last_kl, last_agreement) in zip(*map(dev_figures, (notes[0], notes[-1])), strict=True):
        assert last_kl < 0.9 * kl
        assert last_agreement > agreement


@pytest.mark.parametrize("killed_at", ["step 35 ", "step 94 "])
def test_a_run_that_was_killed_ends_as_an_undisturbed_one(
    tiny_decoder: Callable[..., Decoder], data: dict[str, torch.Tensor], tmp_path: Path, killed_at: str
) -> None:
    decoder, notes = tiny_decoder("gqa", torch.float32), []
    undisturbed = trained(decoder, data, tmp_path / "undisturbed", lambda _: None)

    def kill(note: str) -> None:
        if note.startswith(killed_at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(decoder, data, tmp_path / "killed", kill)
    (tmp_path / "killed" / "partial").mkdir()  # as a kill while writing leaves it
    resumed = trained(decoder, data, tmp_path / "killed", notes.append)
    assert "going on after step" in notes[0]
    for own, other in zip(undisturbed, resumed, strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())


def test_training_ends_when_nothing_gets_better_and_keeps_the_best(
    tiny_decoder: Callable[..., Decoder], data: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    notes: list[str] = []
    decoder = tiny_decoder("gqa", torch.float32)
    start = [initial_tensors(decoder, ExitSpec(n, "mlp", intermediate=24), torch.eye(32)) for n in EXITS]
    best = trained(decoder, data, tmp_path, notes.append, replace(QUICK, lr=100.0))  # far too high
    assert "stopped after step 21 of 94" in notes[-1]
    assert all(torch.equal(own[name], first[name]) for own, first in zip(best, start, strict=True) for name in own)


def test_the_last_steps_look_at_the_whole_vocabulary(
    tiny_decoder: Callable[..., Decoder], data: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = distill_module._Run._logs

    def logs(run: Any, module: Any, hidden: torch.Tensor, vocabulary: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # and not in an evaluation
            sizes.append(len(vocabulary))
        return plain(run, module, hidden, vocabulary)

    monkeypatch.setattr(distill_module._Run, "_logs", logs)
    options = replace(QUICK, epochs=0.64, full_vocabulary_share=0.25)
    trained(tiny_decoder("gqa", torch.float32), data, tmp_path, lambda _: None, options)
    assert sizes == [64] * 15 * 2 + [272] * 5 * 2


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": f"prompt number {i}, {'ab' * (i % 7)}"}) for i in range(80)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def run(tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path) -> partial[Tuned | None]:
    flags = {
        "model.name": str(tiny_model("gqa")),
        "model.dtype": "float32",
        "model.device": "cpu",
        "sampling.max_tokens": 16,
        "cache.num_blocks": 200,
    }
    arguments: dict[str, Any] = {
        "prompts": prompts,
        "exits": EXITS,
        "output": tmp_path / "heads",
        "num_prompts": None,
        "options": replace(QUICK, epochs=2),
        "work": tmp_path / "work",
        "note": lambda _: None,
    }
    return partial(tune, lambda packaged: load_settings(flags=flags, packaged=packaged), **arguments)


def test_from_prompts_to_heads_that_serve_with_gates(
    run: Callable[..., Tuned | None], tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    tuned = run(judge=prompts)
    assert tuned is not None
    assert tuned.other is not None
    assert tuned.other.joint["gate"].thresholds == tuned.dev.joint["gate"].thresholds
    assert tuned.other.tokens > tuned.dev.tokens
    header = json.loads((tmp_path / "heads" / "exit_config.json").read_text(encoding="utf-8"))
    asked = [entry for entry in read_prompt_file(prompts) if isinstance(entry, Request)]
    assert header["made_with"]["prompt_ids"] == sorted(prompt_id(request) for request in asked)
    assert header["made_with"]["width"] == 24
    assert [(e["kind"], e["intermediate"], e["gate"]) for e in header["exits"]] == [
        ("mlp", 24, {"width": 8, "tokens": 50})
    ] * 2
    assert [e["results"]["agreement"] for e in header["exits"]] == pytest.approx(
        [e.agreement for e in tuned.dev.exits], abs=1e-6
    )
    assert [e["completion"] and e["completion"]["layers"] for e in header["exits"]] == [3, 1]
    assert all(0 < told["learned"] < told["propagate"] for told in header["made_with"]["completion"])
    llm = LLM(str(tiny_model("gqa")), heads=str(tmp_path / "heads"), dtype="float32", num_blocks=200)
    assert (llm.settings.exits.layers, llm.settings.exits.measure) == (EXITS, "gate")
    assert llm.settings.exits.completion == "learned"
    assert llm.settings.exits.threshold == tuned.dev.joint["gate"].thresholds
    always = LLM(
        str(tiny_model("gqa")), heads=str(tmp_path / "heads"), dtype="float32", num_blocks=200, threshold=-math.inf
    )
    answer = always.generate([Request("r", prompt="hello", sampling=SamplingParams(max_tokens=5))])[0]
    assert [token.layers_executed for token in answer.tokens][1:] == [EXITS[0]] * (len(answer.tokens) - 1)


@pytest.mark.parametrize("variant", ["biases", "tied-mqa", "qwen2", "qwen3", "head-dim-12", "gemma2", "olmo2"])
def test_every_family_can_be_tuned(
    run: partial[Tuned | None], tiny_model: Callable[[str], Path], tmp_path: Path, variant: str
) -> None:
    model = str(tiny_model(variant))
    flags = {"model.name": model, "model.device": "cpu", "sampling.max_tokens": 6, "cache.num_blocks": 200}
    resolve = partial(load_settings, flags=flags | {"model.dtype": "float32"})
    other = partial(tune, lambda packaged: resolve(packaged=packaged), **run.keywords)
    assert other(options=replace(QUICK, epochs=0.5)) is not None
    llm = LLM(model, heads=str(tmp_path / "heads"), dtype="float32", num_blocks=200, threshold=0.5)
    assert llm.exits == EXITS
    assert len(llm.generate("hello", SamplingParams(max_tokens=5))[0].tokens) > 0


def test_models_with_layer_norms_are_refused(run: partial[Tuned | None], tiny_model: Callable[[str], Path]) -> None:
    resolve = partial(load_settings, flags={"model.name": str(tiny_model("gpt2"))})
    with pytest.raises(ConfigError, match="layer norms; leave early with the model's own norm and head"):
        partial(tune, lambda packaged: resolve(packaged=packaged), **run.keywords)()


def test_exits_that_are_proposed_are_tuned(
    run: Callable[..., Tuned | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("eeinfer.training.auto.select", lambda *args: (seen.append(args), (3,))[1])
    run(exits=None)
    [(found, costs, measure)] = seen
    assert costs.exits == (1, 2, 3, 4, 5)
    assert found.agree.shape[0] == 5
    assert measure == "gate"
    header = json.loads((tmp_path / "heads" / "exit_config.json").read_text(encoding="utf-8"))
    assert [entry["layers_executed"] for entry in header["exits"]] == [3]


def test_heads_without_gates_leave_by_max_prob(run: Callable[..., Tuned | None], tmp_path: Path) -> None:
    tuned = run(options=Options(kind="linear", rank=8, gate_width=0, completion_rank=0, epochs=1))
    assert tuned is not None
    assert list(tuned.dev.joint) == ["max-prob"]
    settings = (tmp_path / "heads" / "eeinfer.toml").read_text(encoding="utf-8")
    assert 'measure = "max-prob"' in settings
    assert "completion" not in settings
    assert load_file(tmp_path / "heads" / "exit_heads.safetensors")["exits.1.linear.down.weight"].shape == (8, 32)


def test_a_second_run_finds_everything_done(
    run: Callable[..., Tuned | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    first = load_file(tmp_path / "heads" / "exit_heads.safetensors")
    monkeypatch.setattr("eeinfer.training.job.LLM", None)  # nothing is to be answered
    notes: list[str] = []
    run(note=notes.append)
    assert any("going on after step" in note for note in notes)
    second = load_file(tmp_path / "heads" / "exit_heads.safetensors")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    run(note=notes.append, resume=False)
    assert sum("going on after step" in note for note in notes) == 1


def test_what_cannot_be_tuned_is_refused(run: Callable[..., Tuned | None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--exits"):
        run(exits=(4, 2))
    with pytest.raises(ConfigError, match="--width 49"):
        run(options=Options(width=49))
    with pytest.raises(ConfigError, match="--rank 33"):
        run(options=Options(rank=33))
    with pytest.raises(ConfigError, match="--kind linear"):
        run(options=Options(kind="linear", width=8))
    with pytest.raises(EeinferError, match="too few"):
        run(num_prompts=1)
    (tmp_path / "heads" / "calibration.toml").touch()
    with pytest.raises(EeinferError, match=r"calibration\.toml"):
        run()
    (tmp_path / "heads" / "calibration.toml").unlink()
    with FileLock(tmp_path / "work" / ".lock"), pytest.raises(EeinferError, match="another run"):
        run()
