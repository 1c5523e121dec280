"""`config init`, `set`, `unset`, `get`, `path`: changes to files, with what stands around them kept."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_llm import Run, runner
from hypothesis import given, settings
from hypothesis import strategies as st

from eeinfer.config.edit import edit_file
from eeinfer.config.load import load_settings
from eeinfer.config.schema import Settings, declared
from eeinfer.config.sources import Source
from eeinfer.errors import ConfigError


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return runner(monkeypatch, capsys)


def edited(folder: Path, text: str | None, edits: dict[str, Any], **options: Any) -> tuple[str, list[str]]:
    """The file after the edits, and what was noted."""
    path = folder / "eeinfer.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    notes: list[str] = []
    edit_file(
        Source(path, str(path), options.get("table", ())), edits, profile=options.get("profile"), note=notes.append
    )
    return path.read_text(encoding="utf-8"), notes


COMMENTED = """# head
[exits] # of exits
# why
threshold = [
    0.8, # first
    0.9,
] # both
measure = "margin"  # a # in "quotes"

[model]
name = "a#b" # name
"""


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        (None, {"exits.decay": 2.0}, "[exits]\ndecay = 2.0\n"),
        ("[exits]\ndecay = 1\n", {"exits.decay": 2.0}, "[exits]\ndecay = 2.0\n"),
        ("[exits]\n\n[model]\n", {"exits.decay": 2.0}, "[exits]\ndecay = 2.0\n\n[model]\n"),
        ("[ exits ]\ndecay = 1", {"exits.decay": None}, "[ exits ]\n"),
        ("[exits]\n# decay = 0.0\n# x = 1\n", {"exits.decay": 1.5}, "[exits]\n# decay = 0.0\ndecay = 1.5\n# x = 1\n"),
        ("[model]\n", {"exits.threshold": (0.5, float("inf"))}, "[model]\n\n[exits]\nthreshold = [0.5, inf]\n"),
        (
            COMMENTED,
            {"exits.threshold": 0.5, "exits.measure": "entropy", "model.name": "c"},
            COMMENTED.replace("[\n    0.8, # first\n    0.9,\n]", "0.5")
            .replace("margin", "entropy")
            .replace("a#b", "c"),
        ),
        (COMMENTED, {"cache.block_size": None}, COMMENTED),
    ],
)
def test_the_rest_of_the_file_stays(tmp_path: Path, before: str | None, edits: dict[str, Any], after: str) -> None:
    assert edited(tmp_path, before, edits) == (after, [])


def test_a_profile_and_a_pyproject_have_their_own_tables(tmp_path: Path) -> None:
    text, _ = edited(tmp_path, "[exits]\ndecay = 1.0\n", {"exits.decay": 2.0}, profile="my fast")
    assert tomllib.loads(text) == {"exits": {"decay": 1.0}, "profile": {"my fast": {"exits": {"decay": 2.0}}}}
    text, _ = edited(tmp_path, "[tool.x] # kept\n", {"exits.decay": 2.0}, table=("tool", "eeinfer"))
    assert text == "[tool.x] # kept\n\n[tool.eeinfer.exits]\ndecay = 2.0\n"


def test_what_cannot_be_changed_in_place_is_written_anew_and_said(tmp_path: Path) -> None:
    text, notes = edited(tmp_path, "exits.decay = 1 # dotted\n", {"exits.measure": "margin"})
    assert tomllib.loads(text) == {"exits": {"decay": 1, "measure": "margin"}}
    assert "without its comments" in notes[0]
    assert edited(tmp_path, "exits = {decay = 1}\n", {"exits.decay": 2})[1] == []  # none are lost
    with pytest.raises(ConfigError, match="edit it by hand"):
        edited(tmp_path, "[tool]\neeinfer = {exits = {decay = 1}}\n", {"exits.decay": 2}, table=("tool", "eeinfer"))


@pytest.mark.parametrize(
    ("text", "edits", "message"),
    [
        ("[exits]\ntreshold = 1\n", {"exits.decay": 1.0}, "unknown key 'exits.treshold'"),
        ("[exits]\ndecay = -1\n", {"exits.measure": "margin"}, "exits.decay must be"),
        ("[exits]\nlayers = [2, 4]\n", {"exits.threshold": (0.5,)}, "exits.threshold has 1 values"),
        ("[exits\n", {"exits.decay": 1.0}, "not valid TOML"),
    ],
)
def test_nothing_is_written_unless_the_whole_file_is_valid(
    tmp_path: Path, text: str, edits: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"eeinfer\.toml") as caught:
        edited(tmp_path, text, edits)
    assert message in str(caught.value)
    assert (tmp_path / "eeinfer.toml").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["eeinfer.toml"]


def test_a_link_and_the_rights_of_a_file_stay(tmp_path: Path) -> None:
    target = tmp_path / "real.toml"
    target.write_text("[exits]\n")
    target.chmod(0o600)
    (tmp_path / "eeinfer.toml").symlink_to(target)
    edited(tmp_path, None, {"exits.decay": 1.0})
    assert (tmp_path / "eeinfer.toml").is_symlink()
    assert target.read_text() == "[exits]\ndecay = 1.0\n"
    assert target.stat().st_mode & 0o777 == 0o600


NAMES = ["exits.decay", "exits.measure", "sampling.seed", "model.name"]
VALUES = {
    "exits.decay": st.floats(0, 10),
    "exits.measure": st.sampled_from(["margin", "entropy"]),
    "sampling.seed": st.integers(0, 9),
    "model.name": st.text("ab#\"'[]=\\ \u00e4", min_size=1, max_size=6),
}
EDITS = st.lists(
    st.sampled_from(NAMES).flatmap(lambda key: st.tuples(st.just(key), st.none() | VALUES[key])), min_size=1, max_size=5
)


@given(edits=EDITS, layout=st.permutations(["exits", "sampling", "model"]), count=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_after_any_edits_the_file_holds_what_was_set_last(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, Any]], layout: list[str], count: int
) -> None:
    folder = tmp_path_factory.mktemp("edits")
    text = "".join(f"# before {name}\n[{name}] # {name}\n\n# after\n" for name in layout[:count])
    expected: dict[str, Any] = {}
    after = text
    for key, value in edits:
        expected[key] = value
        after, notes = edited(folder, after, {key: value})
        assert notes == []
    held = {f"{section}.{name}": value for section, own in tomllib.loads(after).items() for name, value in own.items()}
    assert held == {key: value for key, value in expected.items() if value is not None}
    assert [line for line in after.splitlines() if "#" in line and "=" not in line] == [
        line for line in text.splitlines() if "#" in line
    ]


def test_init_writes_every_setting_commented_out(run: Run) -> None:
    path = Path(run("config", "init").out.strip())
    text = path.read_text(encoding="utf-8")
    assert path == Path.cwd() / "eeinfer.toml"
    assert load_settings(files=[path], environ={}).settings == Settings()
    live = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    assert {f"{s}.{k}" for s, own in tomllib.loads(live).items() for k in own} == set(declared())
    again = run("config", "init")
    assert (again.code, "is there already" in again.err) == (2, True)
    assert run("config", "init", "--force").code == 0


def test_set_get_unset_and_path(run: Run, tmp_path: Path) -> None:
    user, project = tmp_path / "home" / "eeinfer" / "config.toml", Path.cwd() / "eeinfer.toml"
    assert run("config", "path").out == f"{user} (user), does not exist\n{project} (project), does not exist\n"
    assert run("config", "path", "--user").out == f"{user}\n"
    assert run("config", "set", "--user", "sampling.seed", "3").err == f"written to {user}\n"
    assert run("config", "set", "exits.layers=2,4", "exits.threshold = 0.5,inf").code == 0
    assert tomllib.loads(project.read_text())["exits"] == {"layers": [2, 4], "threshold": [0.5, float("inf")]}
    assert run("config", "get", "sampling.seed", "--origin").out == f"3\t{user} (user)\n"
    assert run("config", "get", "exits.threshold").out == "[0.5, inf]\n"
    assert run("config", "get", "model.dtype", "--set", "model.dtype=float32").out == "float32\n"
    assert run("config", "get", "sampling.seed", "--no-config").out == "0\n"
    assert run("config", "set", "--profile", "p", "sampling.seed=4").code == 0
    assert run("config", "get", "sampling.seed", "--profile", "p").out == "4\n"
    assert run("config", "unset", "exits.layers", "exits.threshold").code == 0
    assert tomllib.loads(project.read_text())["exits"] == {}
    assert run("config", "path").out == f"{user} (user)\n{project} (project)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "exits.treshold", "0.5"], "unknown key 'exits.treshold'; did you mean 'exits.threshold'?"),
        (["set", "exits.threshold", "soon"], "exits.threshold must be a number"),
        (["set", "exits.threshold"], "expected section.key=value"),
        (["get", "exits.treshold"], "did you mean 'exits.threshold'?"),
        (["unset", "exits.treshold"], "did you mean 'exits.threshold'?"),
        (["set", "--user", "--project", "sampling.seed", "1"], "two files; name one"),
    ],
)
def test_what_cannot_be_set_is_told_and_nothing_written(run: Run, arguments: list[str], message: str) -> None:
    ended = run("config", *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert list(Path.cwd().iterdir()) == []
