"""What every command has: examples that parse, help in the README, completion, `--quiet` and `--log-level`."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_llm import ROOT, Run, runner

from eeinfer.cli.app import app
from eeinfer.cli.examples import EXAMPLES, command_line, commands

NAMES = [name for name, _ in commands(command_line(app))]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def parse(arguments: list[str]) -> None:
    """Parse without running anything; a SystemExit or usage error says what is wrong."""
    command: Any = command_line(app)
    context = None
    name = "eeinfer"
    while True:
        context = command.make_context(name, arguments, parent=context)
        rest = [*context._protected_args, *context.args]
        if not rest or not hasattr(command, "commands"):
            break
        name, arguments = rest[0], rest[1:]
        command = command.commands[name]


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(NAMES)


PRESETS = [
    line.removeprefix("#").strip()
    for path in sorted((ROOT / "configs").glob("*.toml"))
    for line in path.read_text(encoding="utf-8").splitlines()
    if line.startswith("#     eeinfer")
]


@pytest.mark.parametrize("example", [*(one for own in EXAMPLES.values() for one in own), *PRESETS])
def test_examples_parse(example: str) -> None:
    if example.startswith("$EDITOR"):
        example = example.partition("$(")[2].removesuffix(")")
    words = shlex.split(example.partition(" <")[0].partition(" >")[0])
    assert words[0] == "eeinfer"
    parse(words[1:])


def test_a_wrong_example_would_not_parse() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["generate", "--nonsense"])


def test_every_preset_says_how_to_use_it() -> None:
    assert len(PRESETS) == len(list((ROOT / "configs").glob("*.toml")))
    assert all(Path(ROOT, shlex.split(line)[shlex.split(line).index("-c") + 1]).is_file() for line in PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_examples_and_the_common_options(run: Run, name: str) -> None:
    ended = run(*name.split(), "--help")
    assert ended.code == 0
    shown = " ".join(ended.out.split())
    for words in ("Examples:", *EXAMPLES[name], "--quiet", "--log-level"):
        assert words in shown


def test_the_readme_has_the_help_of_every_command() -> None:
    spec = importlib.util.spec_from_file_location("write_help", ROOT / "scripts" / "write_help.py")
    assert spec
    assert spec.loader
    write_help = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_help)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(write_help.BEGIN) == text.count(write_help.END) == 1
    assert write_help.updated(text) == text, "run: python scripts/write_help.py"
    assert "\x1b" not in write_help.section()


def asked(shell: str, *words: str) -> dict[str, str]:
    """The variables by which a shell asks what the last of the words may become."""
    line = shlex.join(["eeinfer", *words])
    return {
        "_EEINFER_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    def offered(*words: str, shell: str = "bash") -> list[str]:
        for name, value in asked(shell, *words).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            command_line(app)([], prog_name="eeinfer")
        return capsys.readouterr().out.split()

    return offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(completed: Callable[..., list[str]], shell: str) -> None:
    assert any("calibrate-thresholds" in word for word in completed("cal", shell=shell))


def test_the_installed_command_answers_a_shell() -> None:
    program = "import sys; sys.argv[0] = 'eeinfer'\nfrom eeinfer.cli.app import main\nmain()"
    environ = {**os.environ, **asked("bash", "gen")}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("generate\n", "")


def test_options_choices_settings_and_models_complete(
    completed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "org--tiny").mkdir(parents=True)
    (tmp_path / "models" / "org--tiny" / "eeinfer_pull.json").write_text("{}")
    monkeypatch.setenv("EEINFER_HOME", str(tmp_path))
    assert completed("generate", "--str") == ["--strategy"]
    assert completed("generate", "--strategy", "al") == ["all-exit"]
    assert completed("config", "get", "exits.thr") == ["exits.threshold"]
    assert completed("config", "show", "--set", "exits.thr") == ["exits.threshold="]
    assert completed("inspect", "o") == ["org/tiny"]
    assert completed("generate", "-m", "o") == ["org/tiny"]


BAD = '{"prompt": "a b"}\n{"prompt": "fail"}\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [(["-q"], []), ([], ["--quiet"]), (["--log-level", "error"], []), ([], ["--log-level", "error"])],
)
def test_quiet_silences_notices_and_never_errors(run: Run, before: list[str], after: list[str]) -> None:
    usual = run("generate", "--prompts", "-", stdin=BAD)
    assert usual.err.startswith("loaded\n")
    assert "answered" in usual.err
    quiet = run(*before, "generate", "--prompts", "-", *after, stdin=BAD)
    assert (quiet.code, quiet.out) == (usual.code, usual.out) == (1, usual.out)
    assert quiet.err == "1 of 2 prompts failed; the first: standard input, line 2: line-2: the prompt is too long\n"
    assert run(*before, "generate", "--batch", "0", *after).err.startswith("error: argument: batching.max_num_seqs")
    assert run("generate", "--prompts", "-", stdin=BAD).err == usual.err  # the next run speaks again


def test_the_log_level_may_come_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EEINFER_LOG_LEVEL", "error")
    assert "loaded" not in run("generate", "--prompts", "-", stdin=BAD).err
    assert "loaded" in run("generate", "--prompts", "-", "--log-level", "info", stdin=BAD).err
    monkeypatch.setenv("EEINFER_LOG_LEVEL", "eror")
    ended = run("config", "path")
    assert (ended.code, ended.err) == (2, "error: EEINFER_LOG_LEVEL: unknown level 'eror'; did you mean 'error'?\n")
    monkeypatch.setenv("EEINFER_LOG_LEVEL", "debug")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "eeinfer").mkdir()
    (tmp_path / "eeinfer" / "config.toml").write_text("")
    assert f"debug: eeinfer: settings of {tmp_path}" in run("config", "get", "sampling.seed").err


def test_no_color_takes_the_colours_of_help() -> None:
    def shown(**environ: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "eeinfer", "--help"],
            cwd=ROOT,
            env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stdout

    colour = re.compile(r"\x1b\[(\d+;)*3\d")
    assert colour.search(shown())
    assert not colour.search(shown(NO_COLOR="1"))


def test_the_options_of_all_commands_reach_no_body() -> None:
    def is_ours(parameter: Any) -> bool:
        return parameter.name in {"quiet", "log_level"}

    found = [parameter for _, command in commands(command_line(app)) for parameter in command.params]
    assert sum(map(is_ours, found)) == 2 * len(NAMES)
    assert not any(parameter.expose_value for parameter in found if is_ours(parameter))
    assert isinstance(app, typer.Typer)
