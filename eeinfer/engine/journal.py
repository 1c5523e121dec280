"""The journal of a run: its answers as they finish, in a file beside the one that they will become.

`FILE.journal` is JSON Lines: a header that tells what makes the answers, then a record for each, with its place among
the prompts and its line. When all are there, the lines go in order into a temporary file, which takes the name FILE,
and the journal goes away. Records are only ever appended and handed to the system one by one, so a process that is
killed loses no finished answer, and only the last record can be torn; it is dropped.

A lock beside the target, freed by the system when its holder dies, keeps two runs apart. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from eeinfer.engine.answer_outcome import outcome_of
from eeinfer.errors import EeinferError

FORMAT = "eeinfer_journal"
FORMAT_VERSION = 1


def encode_line(line: Mapping[str, Any]) -> bytes:
    """An answer's line as it stands in the file, with its line end."""
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


class Journal:
    """An open journal. `place in journal` tells whether the answer at that place (from 0) is there.

    Attributes:
        target: the file that the answers will become.
        path: the journal.

    Raises:
        EeinferError: the file is not a journal, or a record other than the last is damaged.
    """

    def __init__(self, target: Path, path: Path, file: BinaryIO) -> None:
        self.target = target
        self.path = path
        self._file = file
        self._header: dict[str, Any] | None = None
        self._offsets: dict[int, int] = {}
        self._end = 0
        self._read()

    def __contains__(self, place: object) -> bool:
        return place in self._offsets

    @property
    def count(self) -> int:
        """Number of answers in it."""
        return len(self._offsets)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Say what makes the answers, before any is made. It must be what made those that are there.

        Raises:
            EeinferError: it is not, and the difference is named; or the journal cannot be written.
        """
        now = json.loads(json.dumps({FORMAT: FORMAT_VERSION, **header}))
        if self._header is None:
            self._write(encode_line(now))
            self._header = now
        elif found := "; ".join(_differences(self._header, now)):
            raise EeinferError(
                f"--resume: {self.path} was made by another run: {found}. Run with what it was made with, or delete it "
                f"to start over"
            )

    def append(self, place: int, line: Mapping[str, Any]) -> None:
        """Add an answer.

        Raises:
            EeinferError: the journal cannot be written, as on a full disk; the answers before are kept.
        """
        offset = self._end
        self._write(b'{"place": %d, "line": %b}\n' % (place, encode_line(line).rstrip()))
        self._offsets[place] = offset

    def answer(self, place: int) -> dict[str, Any]:
        """The line of the answer at `place`, which is there."""
        self._file.seek(self._offsets[place])
        line: dict[str, Any] = json.loads(self._file.readline())["line"]
        return line

    def publish(self, total: int, others: Mapping[int, Mapping[str, Any]]) -> None:
        """Put `total` lines in order into the target, and remove the journal.

        Args:
            total: number of lines.
            others: lines by place that are not in the journal.

        Raises:
            EeinferError: the target cannot be written; all answers stay in the journal.
        """
        temporary = self.target.with_name(f".{self.target.name}.new")
        try:
            with temporary.open("wb") as file:
                for place in range(total):
                    file.write(encode_line(others[place] if place in others else self.answer(place)))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.target)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._error(self.target, error) from None
        _sync_folder(self.target.parent)
        self._offsets.clear()  # so that the journal goes

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise self._error(self.path, error) from None
        self._end += len(data)

    def _error(self, path: Path, error: OSError) -> EeinferError:
        fix = "mend that and run again"
        if self.count:
            fix = f"{self.count} answers are in {self.path}; {fix} with --resume"
        return EeinferError(f"{path}: {error.strerror}; {fix}")

    def _read(self) -> None:
        """Take in what is there, up to a torn last record. Without an answer the header does not count either."""
        self._file.seek(0)
        for number, raw in enumerate(self._file, start=1):
            record = _record(raw)
            if number == 1 and record is not None and FORMAT in record:
                self._header = record
            elif self._header is not None and record is not None and _is_answer(record):
                self._offsets[record["place"]] = self._end
            elif self._header is None and not _torn_header(raw):
                raise EeinferError(f"{self.path} is in the way and is no journal of answers; move it")
            elif self._file.read(1):
                raise EeinferError(
                    f"{self.path}, line {number}: the record is damaged; remove the line, and its answer is made again"
                )
            else:
                break
            self._end += len(raw)
        if not self._offsets:
            self._header, self._end = None, 0
        self._file.truncate(self._end)


def journal_path(target: Path) -> Path:
    """Where the journal of `target` is."""
    return target.with_name(f"{target.name}.journal")


@contextmanager
def open_journal(target: Path, *, resume: bool) -> Iterator[Journal]:
    """The journal of `target`, with its lock held. It goes away at the end if there is no answer in it.

    Raises:
        EeinferError: another run is at work on `target`, nothing can be written there, or a run that was interrupted
            has left answers and `resume` does not say to go on with them.
    """
    path = journal_path(target)
    with _locked(target):
        try:
            file = path.open("a+b")
        except OSError as error:
            raise EeinferError(f"--output {target}: cannot write {path}: {error.strerror}") from None
        journal = None
        try:
            journal = Journal(target, path, file)
            if journal.count and not resume:
                raise EeinferError(
                    f"--output {target}: an interrupted run left {journal.count} answers in {path}; go on with "
                    f"--resume, or delete it to start over"
                )
            yield journal
        finally:
            with suppress(OSError):  # of a write that has failed before
                file.close()
            if journal is not None and not journal.count:
                path.unlink(missing_ok=True)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    path = target.with_name(f".{target.name}.lock")
    lock = FileLock(path)
    try:
        path.touch()  # the library takes some folders that cannot be written to for a lock that is held
        lock.acquire(timeout=0)
    except Timeout:
        raise EeinferError(
            f"--output {target}: another run is writing it and holds {path}; wait for that run, or name another file"
        ) from None
    except OSError as error:
        raise EeinferError(
            f"--output {target}: cannot write in the folder {target.parent}: {error.strerror}; name another"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever has opened it and waits sees that it is gone
        lock.release()


def _record(raw: bytes) -> dict[str, Any] | None:
    """A whole line's object; None for anything else."""
    try:
        record = json.loads(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _torn_header(raw: bytes) -> bool:
    """Whether this is the beginning of a header and no other file's content."""
    start = f'{{"{FORMAT}"'.encode()
    return not raw.endswith(b"\n") and (raw.startswith(start) or start.startswith(raw))


def _is_answer(record: Mapping[str, Any]) -> bool:
    if type(record.get("place")) is not int or record["place"] < 0 or not isinstance(record.get("line"), dict):
        return False
    try:
        outcome_of(record["line"])
    except (AttributeError, KeyError, TypeError):  # edited by hand
        return False
    return True


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two headers, in words."""
    old, new = _flat(then), _flat(now)
    for key in {**new, **old}:
        if old.get(key) != new.get(key):
            yield f"{key} was {_short(old.get(key))}, is {_short(new.get(key))}"


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in header.items():
        found |= _flat(value, f"{prefix}{key} ") if isinstance(value, dict) else {prefix + key: value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return f"{text[:27]}…" if len(text) > 40 else text  # noqa: PLR2004 - enough to tell two hashes apart


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last through a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
