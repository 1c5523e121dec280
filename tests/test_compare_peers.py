"""`scripts/compare_peers.py`: turns, ratios, engines that fail; with fake workers that speak the real protocol."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import compare_peers  # noqa: E402 - a script, found by the line above
from peers.comparison import Cell, Comparison, agreement, paired  # noqa: E402
from peers.engines import Answer, EngineError, LlamaCpp, WorkerEngine  # noqa: E402

FAKE_WORKER = f"""
import json, os, signal, sys, threading, time
sys.path.insert(0, {str(SCRIPTS / "peers")!r})
from worker_protocol import Answer, serve

class Fake:
    version, device = "9.9", "abacus"

    def __init__(self, options):
        self.options, self.turns = options | json.loads(os.environ.get("FAKE", "{{}}")), 0
        if self.options.get("spins"):
            threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()

    def run(self, prompts, output_len):
        print("chatter")
        os.system("echo chatter of a library")
        self.turns += 1
        if log := self.options.get("log"):
            with open(log, "a") as file:
                print(self.options["name"], len(prompts), file=file)
        if self.turns == self.options.get("dies_in_turn"):
            sys.exit("out of memory")
        if self.turns == self.options.get("interrupts_in_turn"):
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(self.options.get("sleeps", 0))
        seconds = self.options.get("seconds", [1.0])[(self.turns - 1) % len(self.options.get("seconds", [1.0]))]
        length = output_len - self.options.get("short", 0)
        return Answer(seconds, seconds / 2, [[prompt[0]] * length for prompt in prompts])

serve(Fake)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., WorkerEngine]:
    """Makes an engine of a fake worker by its options."""
    file = tmp_path / "fake_worker.py"
    file.write_text(FAKE_WORKER)

    def make(name: str, **options: Any) -> WorkerEngine:
        shared = {"name": name, "log": str(tmp_path / "log")}
        return WorkerEngine(name, f"--{name}", (sys.executable, str(file)), os.environ, shared | options)

    return make


@pytest.fixture
def compared() -> Iterator[Callable[..., Comparison]]:
    """Loads and measures engines; ends their processes."""
    made = []

    def run(engines: Sequence[Any], *, batches: Sequence[int] = (2,), warmup: int = 0, repeats: int = 1) -> Comparison:
        made.append(Comparison(engines, [[5, 6], [7, 8]], output_len=4, pause=0.0))
        made[-1].load(str)
        made[-1].measure(batches, warmup, repeats, str)
        return made[-1]

    yield run
    for comparison in made:
        comparison.close()


def cell(seconds: Sequence[float], token_ids: list[list[int]] | None = None) -> Cell:
    """Two prompts, four tokens each; half of the time is decoding."""
    answers = {i: Answer(value, value / 2, token_ids) for i, value in enumerate(seconds)}
    return Cell("any", 2, 4, answers)


def test_engines_take_turns_on_the_same_prompts(
    worker: Callable[..., WorkerEngine], compared: Callable[..., Comparison], tmp_path: Path
) -> None:
    found = compared([worker("a"), worker("b"), worker("c")], batches=(1, 2), warmup=1, repeats=2)
    turns = [f"{name} {batch}" for batch in (1, 2) for _ in range(3) for name in "abc"]
    assert (tmp_path / "log").read_text().splitlines() == turns
    assert sorted(found.cells) == [(name, batch) for name in "abc" for batch in (1, 2)]
    assert all(sorted(cell.answers) == [0, 1] for cell in found.cells.values())
    assert found.cells["c", 2].answers[1].token_ids == [[5] * 4, [7] * 4]
    assert {engine.version for engine in found.engines} == {"9.9"}


def test_speeds_and_paired_ratios() -> None:
    mine, theirs = cell([1.0, 2.0, 4.0]), cell([2.0, 2.0, 2.0])
    assert [mine.speed(number) for number in range(3)] == [8.0, 4.0, 2.0]
    assert mine.decode_speed(0) == 6 / 0.5  # without each answer's first token
    found = paired(mine, theirs, Cell.speed)
    assert found is not None
    assert (found.median, found.low, found.high, found.pairs, found.in_noise) == (1.0, 0.5, 2.0, 3, True)
    del theirs.answers[2]
    found = paired(mine, theirs, Cell.decode_speed)
    assert found is not None
    assert (found.low, found.high, found.pairs) == (1.0, 2.0, 2)
    assert paired(mine, cell([]), Cell.speed) is None


def test_agreement_ends_at_the_first_difference() -> None:
    mine = cell([1.0], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert agreement(mine, cell([1.0], [[1, 2, 3, 4], [1, 9, 3, 4]])) == (1 + 0.25) / 2
    assert agreement(mine, cell([1.0], None)) is None


def test_a_worker_that_dies_is_named_and_the_others_go_on(
    worker: Callable[..., WorkerEngine], compared: Callable[..., Comparison]
) -> None:
    found = compared([worker("a"), worker("b", dies_in_turn=2), worker("c")], repeats=3)
    assert list(found.failures) == ["b"]
    assert "--b" in found.failures["b"]
    assert "code 1" in found.failures["b"]
    assert found.failures["b"].endswith("out of memory")
    rounds = {name: sorted(cell.answers) for (name, _), cell in found.cells.items()}
    assert rounds == {"a": [0, 1, 2], "b": [0], "c": [0, 1, 2]}


def test_an_engine_that_is_not_installed(
    worker: Callable[..., WorkerEngine], compared: Callable[..., Comparison]
) -> None:
    command = (sys.executable, "-c", "import no_such_engine")
    found = compared([WorkerEngine("missing", "--vllm", command, os.environ, {}), worker("b")])
    assert "--vllm" in found.failures["missing"]
    assert "No module named 'no_such_engine'" in found.failures["missing"]
    assert list(found.cells) == [("b", 2)]


def test_short_answers_are_a_failure(worker: Callable[..., WorkerEngine], compared: Callable[..., Comparison]) -> None:
    found = compared([worker("a", short=1), worker("b")])
    assert "[3, 3] tokens" in found.failures["a"]
    assert list(found.cells) == [("b", 2)]


def test_an_engine_that_computes_out_of_its_turn_shows(
    worker: Callable[..., WorkerEngine], compared: Callable[..., Comparison]
) -> None:
    found = compared([worker("sleeper", sleeps=0.4), worker("spinner", spins=True)])
    assert found.idle["spinner"] > 0.1 > found.idle["sleeper"]


def llama(folder: Path, program: str) -> LlamaCpp:
    path = folder / "llama-batched-bench"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    return LlamaCpp(folder, folder / "model.gguf", 3, os.environ)


def test_llama_cpp_does_the_same_work(tmp_path: Path) -> None:
    program = (
        'if [ "$1" = --version ]; then echo "version: 77 (abc)" >&2; exit; fi\n'
        f'echo "$LD_LIBRARY_PATH $*" > {shlex.quote(str(tmp_path / "log"))}\n'
        """echo; echo '{"t_pp": 1.0, "t_tg": 2.0, "t": 3.0}'"""
    )
    engine = llama(tmp_path, program)
    engine.load()
    assert engine.version == "77 (abc)"
    assert engine.run([[1, 2]] * 5, 8) == Answer(3.0, 2.0, None)
    said = (tmp_path / "log").read_text()
    assert said.startswith(str(tmp_path))
    assert "-npl 5 -npp 2 -ntg 7 -c 45 -t 3" in said  # each first token comes from the prompt


def test_llama_cpp_fails_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"code 132; check .*--llama-cpp.*\nIllegal instruction"):
        llama(tmp_path, "echo Illegal instruction >&2; exit 132").run([[1]], 2)
    with pytest.raises(EngineError, match="no figures"):
        llama(tmp_path, "exit 0").run([[1]], 2)


# The command line


def run_script(
    tmp_path: Path, model: Path, *arguments: str, **fake: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The script with eeinfer itself on a tiny model and a fake vLLM; and the figures that it wrote."""
    worker, python, output = tmp_path / "fake_worker.py", tmp_path / "python", tmp_path / "out.json"
    worker.write_text(FAKE_WORKER)
    python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(worker))}\n")
    python.chmod(0o755)
    command = [sys.executable, str(SCRIPTS / "compare_peers.py"), "--model", str(model), "--vllm", str(python)]
    command += ["--transformers", "none", "--input-len", "6", "--output-len", "4", "--warmup", "0", "--device", "cpu"]
    command += ["--output", str(output), *arguments]
    ended = subprocess.run(
        command, env=os.environ | {"FAKE": json.dumps(fake)}, capture_output=True, text=True, check=False
    )
    return ended, json.loads(output.read_text()) if output.exists() else {}


def test_the_whole_with_eeinfer_itself(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    (tmp_path / "model.gguf").touch()
    llama(tmp_path, """echo '{"t_pp": 1.0, "t_tg": 2.0, "t": 3.0}'""")
    peers = ["--llama-cpp", str(tmp_path), "--gguf", str(tmp_path / "model.gguf")]
    ended, report = run_script(tmp_path, tiny_model("gqa"), "--batch", "2", "--repeats", "1", *peers, seconds=[1000])
    assert ended.returncode == 0, ended.stderr
    assert [engine["name"] for engine in report["engines"]] == ["eeinfer full", "vLLM", "llama.cpp"]
    assert [engine["version"] for engine in report["engines"]][1:] == ["9.9", "unknown"]
    assert set(report["left_out"]) == {"OpenVINO", "transformers"}
    cells = {(cell["engine"], cell["batch"]): cell for cell in report["cells"]}
    assert len(cells) == 3
    ours, theirs = (cells[name, 2]["repeats"][0] for name in ("eeinfer full", "vLLM"))
    assert 0 < ours["decode_seconds"] < ours["seconds"]
    assert theirs["tokens_per_second"] == 2 * 4 / 1000
    ratios = {(row["peer"], row["batch"]): row for row in report["ratios"]}
    assert ratios["vLLM", 2]["total"]["median"] == ours["tokens_per_second"] / theirs["tokens_per_second"]
    assert cells["vLLM", 2]["same_tokens"] < 1
    assert cells["llama.cpp", 2]["same_tokens"] is None
    assert "left out: OpenVINO; give --openvino" in ended.stdout
    assert "One repeat tells nothing about the spread" in ended.stdout


def test_an_interrupt_keeps_what_was_measured(worker: Callable[..., WorkerEngine]) -> None:
    comparison = Comparison([worker("a"), worker("b", interrupts_in_turn=2)], [[5, 6]], 4, pause=0.0)
    workload = compare_peers.Workload((1,), input_len=2, output_len=4, repeats=3, warmup=0, seed=0)
    assert compare_peers._measured(comparison, workload)
    assert {name: len(cell.answers) for (name, _), cell in comparison.cells.items()} == {"a": 2, "b": 1}
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch: '0' must be an integer from 1 on"),
        (["--strategy", "ful"], "--strategy: unknown strategy 'ful'"),
        (["--input-len", "150", "--output-len", "11"], "exceed the model's context of 160"),
        (["--openvino", sys.executable], "--openvino needs --openvino-model"),
        (["--llama-cpp", str(ROOT)], "--llama-cpp needs --gguf"),
        (["--llama-cpp", str(ROOT), "--gguf", str(ROOT / "LICENSE")], "has no llama-batched-bench"),
        (["--transformers", "no/python"], "--transformers no/python: no such file"),
        (["--output", "no/folder/out.json"], "--output"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str],
    message: str,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_peers.py", "--model", str(tiny_model("gqa")), *arguments])
    with pytest.raises(SystemExit) as ended:
        compare_peers.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
