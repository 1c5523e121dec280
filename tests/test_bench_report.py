"""Result files: what is written is read back, and what is not a result is refused with a fix."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from sample_report import cell, report

from eeinfer.bench.environment import commit, environment
from eeinfer.bench.metrics import summarise
from eeinfer.bench.report import append_report, check_destination, read_report, write_report
from eeinfer.errors import ConfigError, EeinferError


def silent(message: str) -> None:
    raise AssertionError(message)


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    made = report(cell(), cell("split", threshold=(inf, 0.5)), interrupted=True)
    write_report(tmp_path / "a.json", made)
    assert read_report(tmp_path / "a.json", silent) == made
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    full, split = made["cells"]
    assert split["key"]["threshold"] == ["inf", 0.5]
    assert made["settings"]["exits.threshold"] == ["inf"]
    assert summarise(split, full, 30).exit_shares == {30: 1.0}


def test_no_bare_nan_or_infinity_is_written(tmp_path: Path) -> None:
    made = report(roofline={"a": nan, "b": -inf})
    write_report(tmp_path / "a.json", made)
    append_report(tmp_path / "a.jsonl", made)
    for path in tmp_path.iterdir():
        json.loads(path.read_text(), parse_constant=silent)
    assert made["roofline"] == {"a": "nan", "b": "-inf"}


def test_reports_are_appended_and_the_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    for seed in range(3):
        append_report(path, report(workload={"seed": seed}))
    said: list[str] = []
    assert read_report(path, said.append)["workload"]["seed"] == 2
    assert said == [f"{path} holds 3 results; this is the last one"]


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"schema": "eeinfer-b')
    append_report(path, report())
    assert read_report(path, lambda _: None)["version"] == 1


def without(*places: str) -> Callable[[dict[str, Any]], None]:
    def change(made: dict[str, Any]) -> None:
        inner: Any = made
        for place in places[:-1]:
            inner = inner[int(place)] if place.isdigit() else inner[place]
        del inner[places[-1]]

    return change


def replaced(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.update(entries)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced(schema="other"), "not a result of eeinfer bench"),
        (replaced(version=2), "schema version 2; this eeinfer reads 1"),
        (without("version"), "schema version None"),
        (without("cells"), "cells is missing"),
        (without("model", "num_layers"), "model.num_layers is missing"),
        (without("cells", "1", "key", "batch"), "cells.1.key.batch is missing"),
        (without("cells", "1", "repeats", "2", "ttft"), "cells.1.repeats.2.ttft is missing"),
        (without("cells", "0", "breakdown", "host"), "cells.0.breakdown lacks host"),
        (replaced(cells="none"), "cells: "),
        (lambda made: made["cells"].pop(0), "cells.0 has no cell of full"),
    ],
)
def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    made = report()
    change(made)
    path = tmp_path / "a.json"
    write_report(path, made)
    with pytest.raises(EeinferError) as error:
        read_report(path, silent)
    assert str(path) in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "not a result"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{}\n{}\n", r"\.jsonl"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EeinferError, match=said):
        read_report(path, silent)


def test_a_destination_is_checked_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*folder; name a file"):
        check_destination(tmp_path, "--output")
    with pytest.raises(ConfigError, match=r"--append .*does not exist; create it"):
        check_destination(tmp_path / "none" / "a.json", "--append")
    with pytest.raises(ConfigError, match="device or a pipe"):
        check_destination(Path("/dev/null"), "--output")
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    write_report(tmp_path / "link", report())
    assert (tmp_path / "link").is_symlink()
    assert check_destination(tmp_path / "link", "--output") == (tmp_path / "a.json").resolve()


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(EeinferError, match="cannot write the result"):
        write_report(tmp_path / "none" / "a.json", report())
    with pytest.raises(EeinferError, match="cannot write the result"):
        append_report(tmp_path / "none" / "a.jsonl", report())


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_the_commit_is_that_of_the_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "inner").mkdir()
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "v1")
    known = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert commit(tmp_path) == known
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == f"{known}-dirty"
    assert commit(tmp_path / "inner") is None
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) is None


def test_the_environment_has_what_decides_about_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("A_SECRET", "x")
    found = environment(threads=2, device="cpu", device_name=None)
    assert found["OMP_NUM_THREADS"] == "2"
    assert "A_SECRET" not in found
    assert found["memory_bytes"] > 0
    assert found["cpu"]
    json.dumps(found)
