"""Settings from files that nobody names: the user's, the project's, and profiles in any of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import Run, runner

from eeinfer.config.files import HEADS_NAME, places
from eeinfer.config.load import Loaded, load_settings
from eeinfer.config.sources import Source
from eeinfer.errors import ConfigError
from eeinfer.exits.files import CONFIG_NAME


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(*files: Path, **sources: Any) -> Loaded:
    return load_settings(places=[Source(file, str(file)) for file in files], environ={}, **sources)


def refused(*files: Path, **sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*files, **sources)
    return str(caught.value)


SEED = "[sampling]\nseed = 1\n"
PYPROJECT = "[project]\nname = 'x'\n\n[tool.eeinfer.sampling]\nseed = 2\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"repository/eeinfer.toml": SEED}, "repository/eeinfer.toml"),
        ({"repository/sub/eeinfer.toml": SEED, "repository/eeinfer.toml": ""}, "repository/sub/eeinfer.toml"),
        ({"repository/pyproject.toml": PYPROJECT}, "repository/pyproject.toml"),
        ({"repository/pyproject.toml": PYPROJECT, "repository/eeinfer.toml": SEED}, "repository/eeinfer.toml"),
        ({"repository/sub/pyproject.toml": "[tool.x]\n", "repository/eeinfer.toml": SEED}, "repository/eeinfer.toml"),
        ({"eeinfer.toml": SEED}, None),  # outside the repository
        ({"repository/sub/eeinfer.toml": SEED, f"repository/sub/{HEADS_NAME}": "{}"}, None),  # ships with exit heads
    ],
)
def test_the_nearest_project_file_up_to_the_repository_counts(
    tmp_path: Path, files: dict[str, str], found: str | None
) -> None:
    folder = tmp_path / "repository" / "sub"
    folder.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    for name, text in files.items():
        write(tmp_path / name, text)
    present = places(folder, {"XDG_CONFIG_HOME": str(tmp_path / "none")}).present()
    assert [source.path for source in present] == ([tmp_path / found] if found else [])
    settings = load_settings(places=present, environ={}).settings
    assert settings.sampling.seed == (0 if found is None else 2 if "pyproject" in found else 1)


def test_outside_a_repository_the_working_folder_alone_counts(tmp_path: Path) -> None:
    write(tmp_path / "eeinfer.toml", SEED)
    (tmp_path / "sub").mkdir()
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "none")}
    assert len(places(tmp_path, environ).present()) == 1
    assert places(tmp_path / "sub", environ).present() == []


def test_where_the_users_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert places(tmp_path, {}).user.path == tmp_path / ".config" / "eeinfer" / "config.toml"
    assert places(tmp_path, {"XDG_CONFIG_HOME": "/x"}).user.path == Path("/x/eeinfer/config.toml")
    monkeypatch.setattr("sys.platform", "win32")
    assert places(tmp_path, {"APPDATA": "/roaming"}).user.path == Path("/roaming/eeinfer/config.toml")


def test_the_file_that_marks_exit_heads_is_named_alike_everywhere() -> None:
    assert HEADS_NAME == CONFIG_NAME


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool]\neeinfer = 3\n", "tool.eeinfer is a table; write [tool.eeinfer]"),
        ("[tool.eeinfer.exits]\ntreshold = 3\n", "unknown key 'exits.treshold'; did you mean 'exits.threshold'?"),
        ("[tool.eeinfer\n", "line 1, column 14: not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_pyproject_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "pyproject.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_settings(places=places(tmp_path, {"XDG_CONFIG_HOME": "/none"}).present(), environ={})
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_folder_in_a_file_is_meant_from_where_the_file_is(tmp_path: Path) -> None:
    file = write(tmp_path / "sub" / "c.toml", "[model]\nname = '../model'\nheads = './heads'\n")
    for loaded in (load(file), load_settings(files=[file], environ={})):
        model = loaded.settings.model
        assert (model.name, model.heads) == (str(tmp_path / "model"), str(tmp_path / "sub" / "heads"))
    plain = write(tmp_path / "d.toml", "[model]\nname = 'org/name'\nheads = 'auto'\n")
    assert load(plain).settings.model.name == "org/name"
    assert load(plain, flags={"model.heads": "./heads"}).settings.model.heads == "./heads"


PROFILES = """
[sampling]
seed = 1
[profile.base.sampling]
seed = 2
max_tokens = 20
[profile.fast]
inherits = "base"
[profile.fast.sampling]
seed = 3
"""


def test_a_profile_wins_over_files_and_loses_to_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", PROFILES)
    named = write(tmp_path / "b.toml", "[sampling]\nseed = 9\ntemperature = 0.5\n")
    assert load(file, files=[named]).settings.sampling.seed == 9
    loaded = load(file, files=[named], profile="fast")
    sampling = loaded.settings.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.temperature) == (3, 20, 0.5)
    assert loaded.origins["sampling.seed"] == f"profile fast in {file}"
    assert loaded.origins["sampling.max_tokens"] == f"profile base in {file}"
    over = load_settings(files=[file], profile="fast", environ={"EEINFER_SAMPLING__SEED": "4"})
    assert over.settings.sampling.seed == 4
    assert load(file, profile="fast", assignments=["sampling.seed=1"]).settings.sampling.seed == 1


def test_a_profile_of_several_files_is_one(tmp_path: Path) -> None:
    below = write(tmp_path / "a.toml", PROFILES)
    above = write(tmp_path / "b.toml", "[profile.fast.batching]\nmax_num_seqs = 2\n[profile.base.sampling]\nseed = 7\n")
    settings = load(below, above, profile="fast").settings
    assert (settings.sampling.seed, settings.batching.max_num_seqs) == (3, 2)
    assert load(below, above, profile="base").settings.sampling.seed == 7


@pytest.mark.parametrize(
    ("text", "profile", "message"),
    [
        (PROFILES, "fsat", "--profile: unknown profile 'fsat'; did you mean 'fast'?"),
        ("", "fast", "no file of settings that was read has profiles"),
        ("[profile.a]\ninherits = 'b'\n", "a", "profile.a.inherits: unknown profile 'b'"),
        (
            "[profile.a]\ninherits = 'b'\n[profile.b]\ninherits = 'a'\n",
            "a",
            "the profiles a > b > a inherit each other",
        ),
        ("[profile.a]\ninherits = 3\n", None, "profile.a.inherits must be the name of a profile; got 3"),
        ("[profile.a.exits]\ntreshold = 1\n", None, "'profile.a.exits.treshold'; did you mean 'exits.threshold'?"),
        ("[profile.a.exit]\n", None, "unknown section 'profile.a.exit'; did you mean 'exits'?"),
        ("[profile.a.sampling]\nseed = -1\n", None, "profile a: sampling.seed must be an integer >= 0"),
        ("[profile]\na = 1\n", None, "write [profile.a.SECTION]"),
        ("profile = 1\n", None, "write [profile.NAME]"),
        ("[profiles.a]\n", None, "unknown section 'profiles'; did you mean 'profile'?"),
    ],
)
def test_what_is_wrong_with_profiles_is_named(tmp_path: Path, text: str, profile: str | None, message: str) -> None:
    assert message in refused(write(tmp_path / "a.toml", text), profile=profile)


def test_show_says_where_values_come_from_with_every_layer_in_play(
    run: Run, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model("gqa"), model := tmp_path / "model")
    packaged = write(model / "eeinfer.toml", "[exits]\nlayers = [2, 4]\nthreshold = [0.9, 0.8]\ncompletion = 'copy'\n")
    calibration = write(model / "calibration.toml", "[exits]\nlayers = [2, 4]\nthreshold = [0.7, 0.6]\n")
    user = write(tmp_path / "home" / "eeinfer" / "config.toml", f"[model]\nname = '{model}'\ndtype = 'float16'\n")
    (project := tmp_path / "work").mkdir()
    shared = write(project / "eeinfer.toml", "[model]\ndtype = 'float32'\n[profile.p.batching]\nmax_num_seqs = 4\n")
    first = write(tmp_path / "a.toml", "[cache]\nblock_size = 8\nnum_blocks = 7\n[batching]\nstrategy = 'full'\n")
    second = write(tmp_path / "b.toml", "[cache]\nnum_blocks = 9\n[batching]\nmax_num_seqs = 3\nsticky = true\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EEINFER_BATCHING__MAX_NUM_BATCHED_TOKENS", "64")
    given = ["-c", first, "-c", second, "--profile", "p", "--set", "sampling.max_tokens=9", "--strategy", "split"]
    ended = run("config", "show", "--origin", *given)
    assert (ended.code, ended.err) == (0, "")
    assert 'strategy = "split"' in ended.out  # its default, which still beats the file
    origins = {line.partition(" = ")[0]: line.partition(" # ")[2] for line in ended.out.splitlines() if "=" in line}
    assert origins == {
        "name": f"{user} (user)",
        "heads": "built-in default",
        "dtype": f"{shared} (project)",
        "device": "built-in default",
        "kernels": "built-in default",
        "enforce_eager": "built-in default",
        "layers": f"{calibration} (calibration of the exit heads)",
        "measure": "built-in default",
        "threshold": f"{calibration} (calibration of the exit heads)",
        "decay": "built-in default",
        "completion": f"{packaged} (packaged with the exit heads)",
        "strategy": "argument",
        "sticky": str(second),
        "max_num_seqs": f"profile p in {shared}",
        "max_num_batched_tokens": "environment EEINFER_BATCHING__MAX_NUM_BATCHED_TOKENS",
        "block_size": str(first),
        "num_blocks": str(second),
        "memory_fraction": "built-in default",
        "prefix_cache": "built-in default",
        "max_tokens": "--set",
        "temperature": "built-in default",
        "seed": "built-in default",
        **dict.fromkeys(
            ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            "built-in default",
        ),
    }
    alone = run("config", "show", "--origin", "--no-config", "-m", model)
    assert not {str(user), str(shared)} & set(alone.out.split())
    assert str(packaged) in alone.out
