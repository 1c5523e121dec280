"""`eeinfer bench` as a command, on a tiny model: its outputs, and what it refuses before it loads torch."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import ROOT, Ended, Run, runner

from eeinfer.bench import suite
from eeinfer.bench.report import read_report

QUICK = {"--batch": 2, "--num-prompts": 2, "--output-len": 4, "--repeats": 1, "--warmup": 0, "--input-len": 5}
TINY = {"--dtype": "float32", "--device": "cpu", "--num-blocks": 60, "--exits": "2,4", "--threshold": 0.05}
GIVEN = [part for option, value in (QUICK | TINY).items() for part in (option, str(value))]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def bench(run: Run, tiny_model: Callable[[str], Path]) -> Callable[..., Ended]:
    return lambda *arguments: run("bench", "-m", tiny_model("gqa"), *GIVEN, *arguments)


def test_the_table_names_what_was_measured(bench: Callable[..., Ended]) -> None:
    ended = bench("--roofline")
    assert ended.code == 0
    for word in (
        "all-exit",
        "split",
        "speed-up over full",
        "TTFT",
        "excludes the first token",
        "KV blocks",
        "Roofline",
    ):
        assert word in ended.out, word
    assert "round 1 of 1" in ended.err


def test_every_format_holds_the_same_cells(bench: Callable[..., Ended], tmp_path: Path) -> None:
    file, log = tmp_path / "r.json", tmp_path / "r.jsonl"
    written = json.loads(bench("--format", "json", "-o", file, "--append", log).out)
    assert read_report(file, pytest.fail) == written == json.loads(log.read_text())
    lines = list(csv.DictReader(io.StringIO(bench("--format", "csv", "--append", log).out)))
    assert [line["strategy"] for line in lines] == ["full", "all-exit", "split"]
    assert len(log.read_text().splitlines()) == 2
    assert bench("--format", "md").out.count("| split") >= 4


def test_a_curve_is_in_the_report_and_drawn(bench: Callable[..., Ended], tmp_path: Path) -> None:
    ended = bench("--threshold", "0.5", "--plot", tmp_path / "c.svg", "-o", tmp_path / "r.json")
    assert ended.code == 0, ended.err
    (curve,) = json.loads((tmp_path / "r.json").read_text())["curves"]
    assert [point["threshold"] for point in curve["points"]] == [[0.5, 0.5], [0.05, 0.05]]
    assert "<svg" in (tmp_path / "c.svg").read_text()
    assert "Pareto" in ended.out


def test_two_reports_are_compared(bench: Callable[..., Ended], run: Run, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        bench("-o", tmp_path / name)
    ended = run("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert ended.code == 0
    assert "split" in ended.out
    assert run("bench", "compare", tmp_path / "a.json", tmp_path / "none.json").code == 2


def test_an_interruption_is_marked_and_written(
    bench: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs > 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    measure = suite.measure
    monkeypatch.setattr(suite, "measure", interrupted)
    ended = bench("--repeats", "3", "-o", tmp_path / "r.json")
    report = read_report(tmp_path / "r.json", pytest.fail)
    assert ended.code == 130
    assert report["interrupted"]
    assert [len(cell["repeats"]) for cell in report["cells"]] == [1, 1, 1]
    assert "nterrupted" in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch: '0' must be an integer from 1 on"),
        (["--output-len", "0"], "--output-len: '0' must be"),
        (["--strategy", "splt"], "unknown strategy 'splt'; did you mean 'split'"),
        (["--exits", "6"], "an exit after 6 layers is outside the model, which has 6"),
        (["--num-blocks", "5", "--block-size", "4"], "--batch 2 needs 8 KV blocks"),
        (["--simulate-exits", "2@3"], "exclude each other"),
        (["--random-weights", "llama"], "there is no such shape"),
        (["--output", "/"], "this is a folder"),
        (["--plot", "c.pdf"], "png"),
        (["--batch", "9", "--num-prompts", "9", "--num-blocks", "10"], "the largest batch that fits is 5"),
    ],
)
def test_bad_input_is_named(bench: Callable[..., Ended], arguments: list[str], message: str) -> None:
    ended = bench(*arguments)
    assert ended.code == 2
    assert message in ended.err.replace("\n", " ")
    assert "Traceback" not in ended.err


def test_bad_options_are_told_without_loading_torch() -> None:
    program = (
        "import sys\nfrom eeinfer.cli.app import main\nsys.argv = ['eeinfer', 'bench', '--batch', '0']\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ
    )
    assert ended.stdout == "False\n"
