"""The command line, with a fake LLM: help and its cost, options and their keys, `config show`, `tune-heads`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_llm import ROOT, FakeLLM, Run, runner

from eeinfer.cli.options import FLAGS
from eeinfer.config.schema import declared

HEAVY = {"accelerate", "gguf", "numpy", "pydantic", "scipy", "tokenizers", "torch", "transformers"}


COMMANDS = [
    ["pull"],
    ["convert"],
    ["generate"],
    ["bench"],
    ["bench", "compare"],
    ["tune-heads"],
    ["calibrate-thresholds"],
    ["config"],
    ["config", "show"],
    ["config", "get"],
    ["config", "set"],
    ["inspect"],
    ["doctor"],
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def heavy_modules(*arguments: str) -> set[str]:
    """Heavy modules that `eeinfer ARGUMENTS` has imported when it ends."""
    program = (
        "import sys\nfrom eeinfer.cli.app import main\n"
        f"sys.argv = ['eeinfer', *{list(arguments)!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return HEAVY & set(ended.stderr.split())


@pytest.mark.parametrize("command", [[], *COMMANDS])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    of_typer = {"pydantic"} if command else set()  # it parses the options of commands with it
    assert heavy_modules(*command, "--help") <= of_typer


def test_a_bad_setting_or_prompt_file_is_told_without_loading_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    assert "torch" not in heavy_modules("generate", "--batch", "0")
    assert "torch" not in heavy_modules("generate", "--prompts", "none.jsonl")
    assert "torch" not in heavy_modules("generate", "--prompts", str(tmp_path / "bad.jsonl"))


def test_help_is_quick() -> None:
    def seconds() -> float:
        """Processor time, as a busy machine makes the clock run on."""
        before = os.times()
        subprocess.run([sys.executable, "-m", "eeinfer", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.3


def test_help_tells_the_exit_codes(run: Run) -> None:
    ended = run("--help")
    assert ended.code == 0
    assert "130 interrupted" in " ".join(ended.out.split())


def test_version(run: Run) -> None:
    try:
        installed = metadata.version("eeinfer")
    except metadata.PackageNotFoundError:
        pytest.skip("eeinfer is not installed, only importable")
    declared_version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert run("--version").out == f"eeinfer {installed}\n" == f"eeinfer {declared_version}\n"


def test_each_option_sets_its_key(run: Run) -> None:
    values = {
        "model.name": "some/model",
        "model.heads": "folder",
        "model.dtype": "float32",
        "model.device": "cpu",
        "exits.layers": "5,10",
        "exits.threshold": "0.5,-inf",
        "model.kernels": "torch",
        "exits.measure": "margin",
        "exits.decay": "1.5",
        "exits.completion": "copy",
        "batching.strategy": "all-exit",
        "batching.max_num_seqs": "3",
        "cache.num_blocks": "64",
        "cache.block_size": "8",
        "sampling.max_tokens": "9",
        "sampling.temperature": "0.5",
        "sampling.top_p": "0.75",
        "sampling.top_k": "12",
        "sampling.min_p": "0.25",
        "sampling.repetition_penalty": "1.5",
        "sampling.presence_penalty": "0.5",
        "sampling.frequency_penalty": "1.25",
        "sampling.seed": "11",
    }
    switches = {"cache.prefix_cache": ("--no-prefix-cache", False), "model.enforce_eager": ("--enforce-eager", True)}
    assert {*values, *switches} == set(FLAGS) <= set(declared())
    arguments = [part for key, value in values.items() for part in (FLAGS[key].spellings[-1], value)]
    arguments += [flag for flag, _ in switches.values()]
    shown = json.loads(run("config", "show", "--json", "--origin", *arguments).out)
    given = {key: entry["value"] for key, entry in shown.items() if entry["origin"] == "argument"}
    numbers = {key: json.loads(value) for key, value in values.items() if value.replace(".", "").isdigit()}
    lists = {"exits.layers": [5, 10], "exits.threshold": [0.5, "-inf"]}
    assert given == {**values, **numbers, **lists, **{key: value for key, (_, value) in switches.items()}}


def test_a_flag_equal_to_the_default_beats_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[batching]\nstrategy = "full"\nmax_num_seqs = 4\n[cache]\nprefix_cache = false\n')
    flags = ("--strategy", "split", "--prefix-cache")
    run("generate", "--prompts", "-", "-c", tmp_path / "c.toml", *flags, stdin='{"prompt": "a"}')
    settings = FakeLLM.built[0].settings
    assert (settings.batching.strategy, settings.batching.max_num_seqs) == ("split", 4)
    assert settings.cache.prefix_cache


def test_config_show_says_where_values_come_from(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text("[exits]\nthreshold = 0.7\n")
    monkeypatch.setenv("EEINFER_SAMPLING__SEED", "5")
    ended = run("config", "show", "--origin", "-c", tmp_path / "c.toml", "--set", "exits.measure=margin")
    assert ended.code == 0
    assert tomllib.loads(ended.out)["exits"] == {
        "layers": "auto",
        "measure": "margin",
        "threshold": 0.7,
        "decay": 0.0,
        "completion": "propagate",
    }
    comments = {line.partition(" = ")[0]: line.partition(" # ")[2] for line in ended.out.splitlines() if "=" in line}
    assert comments["threshold"] == str(tmp_path / "c.toml")
    assert comments["seed"] == "environment EEINFER_SAMPLING__SEED"
    assert comments["measure"] == "--set"
    assert comments["strategy"] == "built-in default"
    assert "#" not in run("config", "show").out


def test_config_show_json_is_json(run: Run) -> None:
    shown = json.loads(run("config", "show", "--json").out, parse_constant=pytest.fail)
    assert shown["exits.threshold"] == "inf"
    assert list(shown) == list(declared())


def test_tune_heads_hands_over_what_was_given(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    training = ModuleType("eeinfer.training.least_squares")
    training.tune = lambda resolve, **arguments: calls.append((resolve(None), arguments)) or []
    monkeypatch.setitem(sys.modules, "eeinfer.training.least_squares", training)
    ended = run(
        "tune-heads", "--exits", "18,21", "-o", tmp_path, "-m", "some/model", "--max-tokens", "9", "--num-prompts", "4"
    )
    assert ended.code == 0
    [(loaded, arguments)] = calls
    assert (loaded.settings.model.name, loaded.settings.sampling.max_tokens) == ("some/model", 9)
    assert loaded.settings.exits.layers == "auto"
    assert arguments.pop("note")
    assert arguments == {
        "prompts": ROOT / "eeinfer" / "data" / "prompts.jsonl",
        "exits": (18, 21),
        "output": tmp_path,
        "num_prompts": 4,
    }
    assert "--exits: exits.layers must be" in run("tune-heads", "--exits", "21,18", "-o", tmp_path).err
    assert run("tune-heads", "--exits", "auto", "-o", tmp_path).code == 2


def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "eeinfer", "config", "show"],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    notices = [line for line in ended.stderr.splitlines() if not line.startswith(b"without what may ship")]
    assert (ended.returncode, notices) == (1, [])


def test_the_package_exposes_its_names_lazily() -> None:
    program = (
        "import sys, eeinfer\n"
        "assert 'torch' not in sys.modules\n"
        "from eeinfer import EeinferError, Request, RequestOutput, SamplingParams\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(eeinfer, 'nonsense')\n"
        "assert set(eeinfer.__all__) <= set(dir(eeinfer))\n"
        "from eeinfer import LLM\n"
        "assert LLM.__module__ == 'eeinfer.engine.llm'\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
