"""`eeinfer calibrate-thresholds` from the command line: table, file, plot, exit codes, bad options."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from faithful import write_faithful_model, write_prompts

from eeinfer.cli.app import main


@pytest.fixture(scope="module")
def faithful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_faithful_model(tmp_path_factory.mktemp("faithful") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", 90)


def eeinfer(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["eeinfer", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def command(model: Path, prompts: Path, *more: object, exits: str = "3,5") -> list[object]:
    flags = ["--dtype", "float64", "--num-blocks", 400, "--max-tokens", 12, "--batch", 16]
    return ["calibrate-thresholds", "-m", model, "--prompts", prompts, "--exits", exits, *flags, *more]


def test_the_command_ends_with_a_table_and_a_file(
    faithful: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "made.toml", tmp_path / "path.png"
    aim = ("--tolerance", 0.15, "--confidence", 0.9, "-o", output, "--plot", plot)
    assert eeinfer(monkeypatch, *command(faithful, prompts, *aim)) == 0
    printed = capsys.readouterr()
    assert "chosen" in printed.out
    assert "Certified: with 0.9 confidence the mean loss of a prompt is at most 0.15" in printed.out
    assert "Hoeffding-Bentkus" in printed.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert tomllib.loads(output.read_text(encoding="utf-8"))["calibration"]["certified"] is True
    assert list((tmp_path / "calibration.work").glob("*.jsonl"))
    assert eeinfer(monkeypatch, "generate", "-m", faithful, "-c", output, *_generate(prompts)) == 0
    answered = capsys.readouterr()
    certified = [json.loads(line)["exits"]["certified"] for line in answered.out.splitlines()]
    assert certified == [{"tolerance": 0.15, "confidence": 0.9}] * 2
    assert "certified" not in answered.err


def _generate(prompts: Path) -> list[object]:
    return ["--prompts", prompts, "--num-prompts", 2, "--dtype", "float64", "--num-blocks", 64, "--max-tokens", 12]


def test_nothing_certified_is_no_failure(
    tiny_model: Callable[[str], Path],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "none.toml"
    aim = ("--tolerance", 0.04, "--confidence", 0.9, "-o", output)
    assert eeinfer(monkeypatch, *command(tiny_model("gqa"), prompts, *aim, exits="3")) == 0
    assert "Not certified, all thresholds are inf: nothing certifies at tolerance 0.04." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--budget", 4, "--tolerance", 0.1), "--budget has no guarantee, so it goes without --tolerance"),
        (("--tolerance", 0), "--tolerance 0: "),
        (("--confidence", 95), "--confidence 95: "),
        (("--exits", "auto"), "--exits auto: name the exits"),
        (("--plot", "x.gif"), "x.gif: a plot is written as .png or .svg"),
        (("-o", "."), "this is a folder; name a file in it"),
        (("--path-prompts", "2"), "--path-prompts 2: give a share between 0 and 1"),
        (("--path-prompts", "none.jsonl"), "none.jsonl: cannot read prompts"),
    ],
)
def test_bad_options_are_told(
    more: tuple[object, ...],
    said: str,
    faithful: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert eeinfer(monkeypatch, *command(faithful, prompts, *more)) == 2
    assert said in capsys.readouterr().err
