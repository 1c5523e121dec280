"""`eeinfer tune-heads --method distill`: what it hands over, what it refuses, and the tables it ends with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_llm import Run, runner

from eeinfer.training.judge import ExitFigures, Judged, MeasureFigures
from eeinfer.training.options import Options
from eeinfer.training.selective import Joint
from eeinfer.training.tune import Tuned

INF = float("inf")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of `tune`, which answers with figures."""
    found: list[dict[str, Any]] = []
    training = ModuleType("eeinfer.training.tune")
    training.tune = lambda _, **arguments: found.append(arguments) or tuned()
    monkeypatch.setitem(sys.modules, "eeinfer.training.tune", training)
    return found


def tuned() -> Tuned:
    measures = {"max-prob": MeasureFigures(0.9, (0.5, 0.25, 0.125)), "gate": MeasureFigures(None, (0.0, 0.0, 0.0))}
    turns = {
        "max-prob": Joint("max-prob", (0.9375,), (0.25,), 0.98765, 3.25, -1.5, 0.96),
        "gate": Joint("gate", (INF,), (0.0,), None, 0.0, 0.0, 1.0),
    }
    return Tuned(Judged(1234, (ExitFigures(18, 0.625, measures),), turns), None)


def test_what_was_given_is_handed_over(run: Run, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    distill = ("tune-heads", "--method", "distill", "-o", tmp_path)
    given = ("--kind", "linear", "--rank", 64, "--gate-width", 0, "--lr", 5e-4, "--epochs", 2, "--no-resume")
    assert run(*distill, "--exits", "18,21", *given, "--work", tmp_path / "w", "--judge", tmp_path / "j").code == 0
    assert run(*distill, "--exits", "auto").code == 0
    first, bare = calls
    assert first["options"] == Options(kind="linear", rank=64, gate_width=0, lr=5e-4, epochs=2)
    assert (first["exits"], first["work"], first["judge"]) == ((18, 21), tmp_path / "w", tmp_path / "j")
    assert first["resume"] is False
    assert (bare["exits"], bare["options"]) == (None, Options())
    assert "resume" not in bare  # the default is that of `tune`


def test_figures_are_printed(run: Run, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    ended = run("tune-heads", "--method", "distill", "--exits", "18", "-o", tmp_path)
    assert len(calls) == 1
    for text in ("1234 tokens", "62.5%", "0.900", "50.0 / 25.0 / 12.5", "0.9375", "98.77%", "3.25", "-1.50", "0.960"):
        assert text in ended.out, text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--width", 64), "--width is for --method distill"),
        (("--full-vocabulary-share", 0.5), "--full-vocabulary-share is for"),
        (("--work", "w"), "--work is for"),
        (("--no-resume",), "--resume is for"),
        (("--judge", "j"), "--judge is for"),
    ],
)
def test_least_squares_takes_no_options_of_training(
    run: Run, tmp_path: Path, flags: tuple[Any, ...], told: str
) -> None:
    ended = run("tune-heads", "--exits", "18", "-o", tmp_path, *flags)
    assert ended.code == 2
    assert told in ended.err


def test_exits_must_be_named_for_least_squares(run: Run, tmp_path: Path) -> None:
    assert "--exits auto is for --method distill" in run("tune-heads", "--exits", "auto", "-o", tmp_path).err
