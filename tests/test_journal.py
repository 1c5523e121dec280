"""The journal by itself: torn and damaged records, other runs' headers, locks, disks that are full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eeinfer.engine.journal import Journal, open_journal
from eeinfer.errors import EeinferError

ROOT = Path(__file__).parent.parent
HEADER: dict[str, Any] = {"version": "1", "prompts": {"count": 3, "hash": "a"}, "config": {"a.b": 1.5, "c.d": None}}
LINES = [
    {"id": "a", "text": "é\u2028\x00", "finish_reason": "stop"},
    {"id": "b", "error": "x"},
    {"id": "c", "text": "", "finish_reason": "length", "n": 0.1},
]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def refused(target: Path, *, resume: bool, match: str) -> None:
    with pytest.raises(EeinferError, match=match), open_journal(target, resume=resume):
        pytest.fail("it must not open")


def interrupted(target: Path, places: list[int], header: dict[str, Any] | None = None) -> Path:
    """A journal that a run has left with the answers at `places`."""
    with open_journal(target, resume=False) as journal:
        journal.begin(header or HEADER)
        for place in places:
            journal.append(place, LINES[place])
    return journal.path


def test_answers_in_any_order_end_in_the_order_of_the_prompts(target: Path) -> None:
    target.write_text("of an earlier run\n")
    interrupted(target, [2])
    assert target.read_text() == "of an earlier run\n"
    assert names(target) == ["answers.jsonl", "answers.jsonl.journal"]
    with open_journal(target, resume=True) as journal:
        journal.begin(HEADER)
        assert [place in journal for place in range(3)] == [False, False, True]
        assert journal.answer(2) == LINES[2]
        journal.append(0, LINES[0])
        journal.publish(3, {1: LINES[1]})
    assert [json.loads(line) for line in target.read_text("utf-8").split("\n")[:-1]] == LINES
    assert names(target) == ["answers.jsonl"]


def test_without_resume_answers_of_an_interrupted_run_are_not_thrown_away(target: Path) -> None:
    path = interrupted(target, [0, 1])
    content = path.read_bytes()
    refused(target, resume=False, match=r"left 2 answers in .*answers\.jsonl\.journal; go on with --resume, or del")
    assert path.read_bytes() == content


def test_a_journal_without_answers_is_no_hindrance_and_does_not_stay(target: Path) -> None:
    with open_journal(target, resume=False) as journal:
        journal.begin(HEADER)
    assert names(target) == []
    journal.path.write_text('{"eeinfer_journal": 1, "version": "0"}\n')
    with open_journal(target, resume=False) as journal:
        journal.begin(HEADER)
        journal.append(0, LINES[0])
    assert [json.loads(line) for line in journal.path.read_text("utf-8").split("\n")[:-1]] == [
        {"eeinfer_journal": 1, **HEADER},
        {"place": 0, "line": LINES[0]},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2"}, 'version was "1", is "2"'),
        ({"prompts": {"count": 3, "hash": "b"}}, 'prompts hash was "a", is "b"'),
        ({"config": {"a.b": 2.5, "c.d": None}}, "config a.b was 1.5, is 2.5"),
        ({"config": {"a.b": 1.5, "c.d": None, "e.f": [1]}}, "config e.f was null, is [1]"),
        ({"config": {"c.d": None}}, "config a.b was 1.5, is null"),
        ({"version": "2", "heads": "x"}, 'version was "1", is "2"; heads was null, is "x"'),
        ({"version": "sha256:" + "ab" * 32}, 'is "sha256:abababababababababa…'),
    ],
)
def test_another_header_is_refused_with_what_differs(target: Path, change: dict[str, Any], message: str) -> None:
    content = interrupted(target, [0]).read_bytes()
    with open_journal(target, resume=True) as journal, pytest.raises(EeinferError) as caught:
        journal.begin(HEADER | change)
    assert message in str(caught.value)
    assert str(journal.path) in str(caught.value)
    assert journal.path.read_bytes() == content


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), junk=st.sampled_from([b"", b"\0\0\0", b"\xff\n", b'{"place": 1, "line"']))
def test_wherever_a_record_is_torn_the_whole_ones_before_it_count(target: Path, cut: int, junk: bytes) -> None:
    path = target.with_name("answers.jsonl.journal")
    path.unlink(missing_ok=True)
    content = interrupted(target, [1, 0, 2]).read_bytes()
    cut = min(cut, len(content))
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    if cut == 0 or (junk and cut < ends[0]):
        return  # then it is no journal any more
    path.write_bytes(content[:cut] + junk)
    whole = sum(end <= cut for end in ends) - 1
    with open_journal(target, resume=True) as journal:
        journal.begin(HEADER)
        assert journal.count == max(whole, 0)
        assert [place for place in (1, 0, 2) if place in journal] == [1, 0, 2][: journal.count]
        for place in range(3):
            if place not in journal:
                journal.append(place, LINES[place])
        assert [journal.answer(place) for place in range(3)] == LINES


def test_a_damaged_record_in_the_middle_is_named(target: Path) -> None:
    path = interrupted(target, [0, 1, 2])
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (b"{\n", b"[]\n", b'{"place": "0", "line": {}}\n', b'{"place": 1}\n', b'{"place": 1, "line": {}}\n'):
        path.write_bytes(b"".join([*lines[:2], bad, *lines[3:]]))
        refused(target, resume=True, match=r"journal, line 3: the record is damaged; remove the line")


@pytest.mark.parametrize("content", [b"notes\n", b"notes", b'{"prompt": "a"}\n', b"{", b"\0\n", b"[" * 100_000 + b"\n"])
def test_a_file_that_is_no_journal_is_left_alone(target: Path, content: bytes) -> None:
    path = target.with_name("answers.jsonl.journal")
    path.write_bytes(content)
    if content == b"{":  # so may a header begin
        with open_journal(target, resume=True) as journal:
            assert journal.count == 0
        return
    for resume in (False, True):
        refused(target, resume=resume, match=r"answers\.jsonl\.journal is in the way and is no journal")
    assert path.read_bytes() == content


HOLD = """
import sys, time
from pathlib import Path
from eeinfer.engine.journal import open_journal
with open_journal(Path(sys.argv[1]), resume=False):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(target: Path) -> Iterator[None]:
    """Another process that holds the lock, and is killed at the end."""
    command = [sys.executable, "-c", HOLD, str(target)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def test_two_runs_do_not_share_a_target_and_the_lock_of_a_dead_one_is_stale(target: Path) -> None:
    with holder(target):
        assert ".answers.jsonl.lock" in names(target)
        for resume in (False, True):
            refused(target, resume=resume, match=r"another run is writing it and holds .*\.answers\.jsonl\.lock; wait")
        with open_journal(target.with_name("other.jsonl"), resume=False):
            pass
    assert ".answers.jsonl.lock" in names(target), "what a killed process leaves"
    with open_journal(target, resume=False) as journal:
        journal.begin(HEADER)
    assert names(target) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to, root included")
def test_a_folder_that_cannot_be_written_to_is_named() -> None:
    refused(
        Path("/proc/a"), resume=False, match=r"--output /proc/a: cannot write in the folder /proc: .*; name another"
    )


class FullDisk:
    """FAKE: a file on a disk that takes so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        self._file.write(data[: max(self.room, 0)])
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)


def test_a_full_disk_keeps_what_was_finished(target: Path) -> None:
    with open_journal(target, resume=False) as journal:
        journal.begin(HEADER)
        journal.append(0, LINES[0])
        journal._file = FullDisk(journal._file, room=20)  # type: ignore[assignment]
        with pytest.raises(EeinferError) as caught:
            journal.append(1, LINES[1])
    kept = f"1 answers are in {journal.path}; mend that and run again with --resume"
    assert str(caught.value) == f"{journal.path}: No space left on device; {kept}"
    with open_journal(target, resume=True) as again:
        again.begin(HEADER)
        assert (again.count, again.answer(0)) == (1, LINES[0])


def test_a_disk_that_is_full_at_the_start_is_told_before_any_work(target: Path) -> None:
    with open_journal(target, resume=False) as journal:
        journal._file = FullDisk(journal._file, room=0)  # type: ignore[assignment]
        with pytest.raises(EeinferError, match=r"No space left on device; mend that and run again$"):
            journal.begin(HEADER)
    assert names(target) == []


def test_a_disk_that_is_full_at_the_end_keeps_the_journal(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    target.write_text("old")
    interrupted(target, [0, 1, 2])
    with monkeypatch.context() as patch, open_journal(target, resume=True) as journal:
        journal.begin(HEADER)
        patch.setattr(os, "fsync", full)
        with pytest.raises(EeinferError, match=r"3 answers are in .*; mend that and run again with --resume"):
            journal.publish(3, {})
    assert (names(target), target.read_text()) == (["answers.jsonl", "answers.jsonl.journal"], "old")
    with open_journal(target, resume=True) as journal:
        journal.begin(HEADER)
        journal.publish(3, {})
    assert len(target.read_bytes().splitlines()) == 3


def test_a_journal_is_whole_after_every_answer(target: Path) -> None:
    """What is in the file after `append` is what a killed process leaves."""
    with open_journal(target, resume=False) as journal:
        journal.begin(HEADER)
        for place, line in enumerate(LINES):
            journal.append(place, line)
            with journal.path.open("a+b") as file:
                assert Journal(target, journal.path, file).count == place + 1
