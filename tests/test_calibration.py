"""`calibrate-thresholds` from prompts to settings that carry a guarantee, on a tiny model in float64."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from faithful import DEEP, SHALLOW, prompt_text, write_faithful_model, write_prompts

from eeinfer import LLM, EeinferError
from eeinfer.calibration import judge as judge_module
from eeinfer.calibration.aim import Aim
from eeinfer.calibration.bounds import hoeffding_bentkus
from eeinfer.calibration.certify import certify
from eeinfer.calibration.judge import Judge
from eeinfer.calibration.layer import headline, write_layer
from eeinfer.calibration.loss import token_losses
from eeinfer.calibration.plot import plot_result
from eeinfer.calibration.prompts import prompt_key
from eeinfer.calibration.result import Result
from eeinfer.config.load import Loaded, load_settings
from eeinfer.core.request import Guarantee
from eeinfer.errors import ConfigError
from eeinfer.exits.files import HeadsFile, save_heads
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec

EXITS = (SHALLOW, DEEP)
AIM = Aim(tolerance=0.07, confidence=0.9)
FLAGS: dict[str, Any] = {
    "model.dtype": "float64",
    "model.device": "cpu",
    "cache.num_blocks": 400,
    "sampling.max_tokens": 12,
    "batching.max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def faithful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_faithful_model(tmp_path_factory.mktemp("faithful") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", 90)


def resolver(model: Path, **flags: Any) -> Callable[[Path | None], Loaded]:
    return lambda packaged: load_settings(packaged=packaged, flags=FLAGS | {"model.name": str(model)} | flags)


Calibrate = Callable[..., Result]


@pytest.fixture
def calibrate(faithful: Path, prompts: Path, tmp_path: Path) -> Calibrate:
    def run(model: Path = faithful, flags: dict[str, Any] | None = None, **options: Any) -> Result:
        defaults = {"prompts": prompts, "work": tmp_path / "work", "aim": AIM, "exit_sets": [EXITS]}
        return certify(resolver(model, **(flags or {})), **(defaults | options))

    return run


def answered_again(result: Result, model: Path, prompts: Path, file: Path) -> int:
    """Answer every prompt under the file that was written, in other batches, and compare; how many were judged."""
    flags = FLAGS | {"model.name": str(model), "batching.max_num_seqs": 5}
    notes: list[str] = []
    llm = LLM.from_loaded(
        lambda packaged: load_settings(packaged=packaged, files=[file], flags=flags), note=notes.append
    )
    assert notes == []
    tokenizer, decoder = llm.engine.tokenizer, llm.engine.runner.decoder
    known = {judged.prompt: judged for judged in result.chosen.sample.judged}
    found = 0
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    for text, answer in zip(texts, llm.generate(texts), strict=True):
        tokens = tuple(tokenizer.encode(text))
        if (judged := known.get(prompt_key(tokens))) is None:
            continue  # it fixed the path
        assert answer.certified == Guarantee(AIM.tolerance, AIM.confidence)
        assert tuple(t.token_id for t in answer.tokens) == judged.answer
        assert tuple(t.layers_executed for t in answer.tokens) == judged.depths
        [loss] = token_losses(decoder, [(tokens, judged.answer)], tokenizer.eos_token_ids)
        assert (loss.loss, loss.strict_loss) == (judged.loss, judged.strict_loss)
        found += 1
    return found


def test_from_prompts_to_answers_with_a_guarantee(
    calibrate: Calibrate, faithful: Path, prompts: Path, tmp_path: Path
) -> None:
    result = calibrate()
    chosen = result.chosen
    assert chosen is not None, result.reason
    assert result.certified
    assert chosen.sample.mean_layers < 6, "something leaves early"
    assert chosen.p_value == pytest.approx(float(hoeffding_bentkus(chosen.sample.loss, result.n, AIM.tolerance)))
    assert chosen.p_value <= 0.1
    assert result.full.strict_loss == 0, "in float64 the full model is never off"
    [outcome] = result.outcomes
    assert [tested.step for tested in outcome.tested] == list(range(outcome.start, outcome.start + len(outcome.tested)))
    assert all(tested.passed for tested in outcome.tested[:-1])
    assert fmean(one.loss for one in chosen.sample.judged) == chosen.sample.loss
    write_layer(result, tmp_path / "made.toml")
    assert answered_again(result, faithful, prompts, tmp_path / "made.toml") == result.n
    table = tomllib.loads((tmp_path / "made.toml").read_text(encoding="utf-8"))
    assert table["exits"]["threshold"] == list(chosen.thresholds)
    assert table["calibration"]["certified"] is True
    assert table["calibration"]["mean_loss"] == chosen.sample.loss
    assert table["calibration"]["n"] == result.n
    assert table["calibration"]["delta"] == pytest.approx(0.1)


def test_certifying_prompts_play_no_part_before_their_test(calibrate: Calibrate, tmp_path: Path) -> None:
    """Path and start stay the same when every certifying prompt is another."""
    ours, path = write_prompts(tmp_path / "a.jsonl", 60), write_prompts(tmp_path / "path.jsonl", 30, "path")
    others = write_prompts(tmp_path / "b.jsonl", 60, "z")
    one, other = (calibrate(prompts=file, path_prompts=path).outcomes[0] for file in (ours, others))
    assert one.path == other.path
    assert one.start == other.start
    assert one.tested[0].sample.losses != other.tested[0].sample.losses


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the prompts that are answered from now on."""
    answered: list[str] = []
    whole = Judge._judged

    def watched(self: Judge, outputs: Any, by_key: Any) -> Any:
        answered.extend(output.id for output in outputs)
        return whole(self, outputs, by_key)

    monkeypatch.setattr(Judge, "_judged", watched)
    return answered


def test_an_interrupted_run_goes_on_where_it_stopped(
    calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(judge_module, "_GROUP", 5)
    answered = counted(monkeypatch)
    undisturbed = calibrate(work=tmp_path / "other")
    whole = len(answered)
    for stop_after in (2, 5, 11):
        left = [stop_after]

        def stop(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate(progress=stop)
    for file in (tmp_path / "work").iterdir():
        with file.open("ab") as lines:
            lines.write(b'{"prompt": "abc", "loss": 0.')  # a line cut off
    answered.clear()
    result = calibrate()
    assert 0 < len(answered) < whole - 10, "what was judged is not judged again"
    assert (result.chosen.step, result.chosen.sample.losses) == (
        undisturbed.chosen.step,
        undisturbed.chosen.sample.losses,
    )
    answered.clear()
    assert calibrate().chosen.sample.seconds == 0
    assert answered == []


def test_another_tolerance_uses_what_is_known_already(calibrate: Calibrate, tmp_path: Path) -> None:
    first = calibrate()
    before = {file.name: file.read_bytes() for file in (tmp_path / "work").iterdir()}
    [full] = [name for name, lines in before.items() if b'"strategy": "full"' in lines]
    second = calibrate(aim=Aim(tolerance=0.12, confidence=0.9))
    after = {file.name: file.read_bytes() for file in (tmp_path / "work").iterdir()}
    assert after[full] == before[full], "full depth is not run again"
    assert all(after[name].startswith(lines) for name, lines in before.items())
    assert [p.thresholds for p in second.outcomes[0].path] == [p.thresholds for p in first.outcomes[0].path]
    assert second.chosen.step >= first.chosen.step


def test_exit_sets_share_the_confidence(calibrate: Calibrate) -> None:
    result = calibrate(exit_sets=[EXITS, (DEEP,)])
    assert result.delta == pytest.approx(0.05)
    assert [outcome.exits for outcome in result.outcomes] == [EXITS, (DEEP,)]
    for outcome in result.outcomes:
        assert all(tested.passed == (tested.p_value <= 0.05) for tested in outcome.tested)
    least = min(o.chosen.sample.mean_layers for o in result.outcomes if o.chosen)
    assert result.chosen.sample.mean_layers == least


@pytest.mark.parametrize("measure", ["similarity", "gate"])
@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_any_measure_and_decay(
    measure: str, decay: float, calibrate: Calibrate, faithful: Path, tmp_path: Path
) -> None:
    """What is written is served: the same depths, token by token."""
    draw = torch.Generator().manual_seed(3)
    specs = tuple(ExitSpec(n, "shared", gate=GateSpec(4)) for n in EXITS)
    tensors = tuple(
        {name: torch.randn(shape, generator=draw) for name, shape in spec.tensor_shapes(32, 272).items()}
        for spec in specs
    )
    flags = {
        "model.heads": str(heads(tmp_path, faithful, specs, tensors)),
        "exits.measure": measure,
        "exits.decay": decay,
    }
    result = calibrate(flags=flags | {"exits.completion": "copy"}, exit_sets=[], aim=Aim(tolerance=0.1, confidence=0.9))
    assert result.chosen is not None, result.reason
    assert result.chosen.exits == EXITS
    write_layer(result, tmp_path / "made.toml")
    files, notes = [tmp_path / "made.toml"], []
    served = FLAGS | {"model.name": str(faithful), "model.heads": flags["model.heads"]}
    llm = LLM.from_loaded(lambda _: load_settings(files=files, flags=served), note=notes.append)
    assert notes == []
    assert (llm.settings.exits.measure, llm.settings.exits.decay) == (measure, decay)
    certifying = [(judged.prompt, judged.depths) for judged in result.chosen.sample.judged]
    depths = {}
    texts = [prompt_text("p", i) for i in range(90)]
    for text, answer in zip(texts, llm.generate(texts), strict=True):
        key = prompt_key(tuple(llm.engine.tokenizer.encode(text)))
        depths[key] = tuple(token.layers_executed for token in answer.tokens)
    assert all(depths[key] == known for key, known in certifying)


def test_when_nothing_certifies_nothing_leaves(
    calibrate: Calibrate, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    result = calibrate(model=tiny_model("gqa"), aim=Aim(tolerance=0.04, confidence=0.9), exit_sets=[(SHALLOW,)])
    assert result.chosen is None
    write_layer(result, tmp_path / "none.toml")
    document = tomllib.loads((tmp_path / "none.toml").read_text(encoding="utf-8"))
    assert document["exits"]["threshold"] == [math.inf]
    assert document["calibration"]["certified"] is False
    assert document["calibration"]["reason"].startswith("nothing certifies at tolerance 0.04. ")
    assert "mean_loss" not in document["calibration"]
    assert headline(result).startswith("Not certified, all thresholds are inf: ")


def test_a_budget_is_met_without_a_guarantee(calibrate: Calibrate, faithful: Path, tmp_path: Path) -> None:
    result = calibrate(aim=Aim(budget=4.5))
    [outcome] = result.outcomes
    assert outcome.pilot[result.chosen.step].mean_layers <= 4.5
    assert outcome.pilot.get(result.chosen.step - 1) is None or outcome.pilot[result.chosen.step - 1].mean_layers > 4.5
    write_layer(result, tmp_path / "budget.toml")
    table = tomllib.loads((tmp_path / "budget.toml").read_text(encoding="utf-8"))["calibration"]
    assert table["certified"] is False
    assert table["reason"] == "chosen for a budget of 4.5 layers, without a guarantee"
    assert "tolerance" not in table
    notes: list[str] = []
    flags = FLAGS | {"model.name": str(faithful)}
    files = [tmp_path / "budget.toml"]
    LLM.from_loaded(lambda packaged: load_settings(packaged=packaged, files=files, flags=flags), note=notes.append)
    assert notes == [f"not certified: chosen for a budget of 4.5 layers, without a guarantee ({files[0]})"]


def test_a_budget_out_of_reach(calibrate: Calibrate) -> None:
    result = calibrate(aim=Aim(budget=1.5))
    assert result.chosen is None
    assert result.reason.startswith("no thresholds meet a budget of 1.5 layers; the most eager run ")


# Bad input


@pytest.mark.parametrize("tolerance", [0.0, -0.1, 1.1, math.nan])
def test_a_tolerance_is_a_share(tolerance: float) -> None:
    with pytest.raises(ConfigError, match=r"^--tolerance .*: it is the share of tokens that may differ"):
        Aim(tolerance=tolerance)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
def test_a_confidence_lies_between_0_and_1(confidence: float) -> None:
    with pytest.raises(ConfigError, match=r"^--confidence .*: give a number between 0 and 1, such as 0\.95"):
        Aim(confidence=confidence)


@pytest.mark.parametrize("budget", [0.0, -3.0, math.nan])
def test_a_budget_is_a_number_of_layers(budget: float) -> None:
    with pytest.raises(ConfigError, match=r"^--budget .*: give mean layers per token"):
        Aim(budget=budget)


def test_too_few_prompts_are_told_how_many_would_do(calibrate: Calibrate) -> None:
    with pytest.raises(ConfigError, match=r"prompts are too few: .* takes 149, .* give more prompts, or raise"):
        calibrate(aim=Aim(tolerance=0.02))


def test_answers_that_end_at_once(calibrate: Calibrate) -> None:
    with pytest.raises(EeinferError, match=r"every answer ends with its first token, .* raise --max-tokens"):
        calibrate(flags={"sampling.max_tokens": 1})


def test_a_prompt_that_fails_is_named(calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch) -> None:
    from eeinfer.calibration.loss import PromptLoss

    monkeypatch.setattr(
        judge_module, "token_losses", lambda _, pairs, *_rest: [PromptLoss(math.nan, 0.0, 3)] * len(pairs)
    )
    with pytest.raises(EeinferError, match=r"^prompt p\d+: its loss is not a number"):
        calibrate()


def heads(
    tmp_path: Path, model: Path, specs: tuple[ExitSpec, ...], tensors: tuple[dict[str, torch.Tensor], ...]
) -> Path:
    folder = tmp_path / "heads"
    folder.mkdir()
    base = LLM(str(model), strategy="full", dtype="float64", num_blocks=64).located.base
    save_heads(folder, base, HeadsFile(specs, tensors), header={}, results=[{} for _ in specs])
    return folder


def test_heads_for_other_exits(calibrate: Calibrate, faithful: Path, tmp_path: Path) -> None:
    folder = heads(tmp_path, faithful, (ExitSpec(DEEP, "shared"),), ({},))
    with pytest.raises(ConfigError, match=r"heads has no head after 3 layers; it has 5: name some of these, or pass"):
        calibrate(flags={"model.heads": str(folder)})


def test_no_exits_at_all(calibrate: Calibrate) -> None:
    with pytest.raises(ConfigError, match="no exits are named and the model has no exit heads: pass --exits"):
        calibrate(exit_sets=[])
    with pytest.raises(ConfigError, match="outside the model, which has 6"):
        calibrate(exit_sets=[(3, 9)])


def test_a_work_folder_that_cannot_be_written(calibrate: Calibrate, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EeinferError, match=r"cannot be (written|read)"):
        calibrate(work=tmp_path / "file" / "work")


def test_the_plot_shows_every_exit_set(calibrate: Calibrate, tmp_path: Path) -> None:
    result = calibrate(exit_sets=[EXITS, (DEEP,)])
    plot_result(result, tmp_path / "two.svg")
    drawn = (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert "<svg" in drawn
    with pytest.raises(EeinferError, match="cannot write the plot"):
        plot_result(result, tmp_path / "missing" / "two.svg")
