"""Where the answers of `generate` go, refused before any work where they cannot go there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from eeinfer.engine.journal import Journal, journal_path, open_journal
from eeinfer.errors import EeinferError


def output_path(given: str, prompts: Path, *, resume: bool) -> Path | None:
    """The file of `--output`, a link followed to its target; None for standard output.

    Raises:
        EeinferError: it is a folder, in a missing folder, or the prompt file itself, or `resume` cannot be.
    """
    if given == "-":
        if resume:
            raise EeinferError("--resume: answers on standard output leave nothing to go on with; name --output FILE")
        return None
    path = _writable(f"--output {given}", given, prompts)
    if is_kept(path) and settings_path(path).is_dir():
        raise EeinferError(f"--output {given}: the settings go to {settings_path(path)}, which is a folder; move it")
    if resume and not is_kept(path):
        raise EeinferError(f"--resume: {path} is a device or a pipe, which keeps no answers; name a file with --output")
    return path


def stats_path(given: str, prompts: Path, output: Path | None) -> Path:
    """The file of `--stats`.

    Raises:
        EeinferError: it cannot be written, or is the prompt file, that of the answers or one that goes with it.
    """
    path = _writable(f"--stats {given}", given, prompts)
    if output is not None and path in {output, journal_path(output), settings_path(output)}:
        raise EeinferError(f"--stats {given}: the answers go to this file; name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EeinferError(f"--stats {given}: cannot be written: permission denied; name another file")
    return path


def settings_path(output: Path) -> Path:
    """Where the settings of the run that makes the file `output` go."""
    return output.with_name(f"{output.name}.settings.toml")


def _writable(option: str, given: str, prompts: Path) -> Path:
    try:
        Path(given).stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is to be made, or a folder is missing
    except OSError as error:  # links that lead round in a circle, a name too long
        raise EeinferError(f"{option}: {error.strerror}; name another file") from None
    path = Path(given).resolve()
    if path.is_dir():
        raise EeinferError(f"{option}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise EeinferError(f"{option}: the folder {path.parent} does not exist; create it first")
    if path.exists() and prompts.exists() and path.samefile(prompts):
        raise EeinferError(f"{option}: this is the prompt file; name another")
    return path


def is_kept(path: Path) -> bool:
    """Whether what is written to `path` stays there; a device or a pipe takes the bytes as they come."""
    return path.is_file() or not path.exists()


@contextmanager
def open_output(path: Path | None, *, resume: bool) -> Iterator[Journal | BinaryIO]:
    """The journal of a file; standard output, a device or a pipe as it is.

    Raises:
        EeinferError: it cannot be written; see also `open_journal`.
    """
    if path is None:
        if sys.stdout is None:
            raise EeinferError("standard output is closed; name a file with --output")
        yield sys.stdout.buffer
    elif is_kept(path):
        with open_journal(path, resume=resume) as journal:
            yield journal
    else:
        try:
            file = path.open("wb")
        except OSError as error:
            raise EeinferError(f"--output {path}: cannot be written: {error.strerror}") from None
        try:
            yield file
        finally:
            with told(f"--output {path}"):  # it tries once more to write what it could not
                file.close()


@contextmanager
def told(name: str) -> Iterator[None]:
    """Names the file, `name`, that could not be written; a reader of standard output that went away is no error.

    Raises:
        EeinferError: it could not be.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EeinferError(f"{name}: cannot be written: {error.strerror or error}") from None
