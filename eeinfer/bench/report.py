"""The result file: a JSON object of a versioned schema, with environment, commit, settings and every repeat.

The dataclasses below are the schema. A file may have more keys; those are left alone. Infinite thresholds are text,
since JSON has no number for them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eeinfer.bench.environment import commit
from eeinfer.bench.metrics import SECTIONS, RunFigures
from eeinfer.bench.quality import Quality
from eeinfer.bench.record import CellKey
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.version import own_version

if TYPE_CHECKING:
    from pydantic import ValidationError

SCHEMA = "eeinfer-bench"
VERSION = 1

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """What was run. `random_weights`: its shape only, with weights that were drawn."""

    name: str
    fingerprint: str | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    weight_bytes: int
    random_weights: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """What was asked. `source`: of the prompts; their number and tokens together are those of the largest group."""

    source: str
    fingerprint: str
    num_prompts: int
    prompt_tokens: int
    ignore_eos: bool
    seed: int
    warmup: int
    repeats: int
    simulate_exits: str | None
    trace: str | None


@dataclass(frozen=True, slots=True)
class CellEntry:
    """One cell. `breakdown`: seconds a decode iteration by section; `roofline`: floor and measured time of one."""

    key: CellKey
    warmup_seconds: float
    repeats: tuple[RunFigures, ...]
    breakdown: dict[str, float] | None
    quality: Quality | None
    roofline: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Contents:
    """A whole file, beside `schema` and `version`. `interrupted`: rounds that were not complete are left out."""

    eeinfer_version: str
    created: str
    interrupted: bool
    environment: dict[str, Any]
    commit: str | None
    command: tuple[str, ...]
    settings: dict[str, Any]
    model: Model
    workload: Workload
    cells: tuple[CellEntry, ...]
    roofline: dict[str, Any] | None


def to_report(
    *,
    environment: Mapping[str, Any],
    command: Sequence[str],
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    workload: Mapping[str, Any],
    cells: Iterable[CellEntry],
    interrupted: bool = False,
    roofline: Mapping[str, Any] | None = None,
) -> Report:
    """The report of a benchmark: plain, and the same as what `read_report` gives back.

    Args:
        environment: from `eeinfer.bench.environment`.
        command: the arguments of the process.
        settings: values by dotted key.
        model: the fields of `Model`.
        workload: the fields of `Workload`.
        cells: group by group, `full` first in each.
        interrupted: whether rounds are missing.
        roofline: what the probes found.
    """
    contents = {
        "schema": SCHEMA,
        "version": VERSION,
        "eeinfer_version": own_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "environment": environment,
        "commit": commit(),
        "command": command,
        "settings": settings,
        "model": model,
        "workload": workload,
        "cells": [asdict(cell) for cell in cells],
        "roofline": roofline,
    }
    return {key: _plain(value) for key, value in contents.items()}


def _plain(value: Any) -> Any:
    """`value` as JSON would give it back; numbers that JSON lacks become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def check_destination(path: Path, option: str) -> Path:
    """The file to write, a link followed to its target.

    Raises:
        ConfigError: it is a folder, something else that is no file, or in a missing folder; names `option`.
    """
    path = path.resolve()
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option} {path}: this is a device or a pipe; name a file")
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.touch()
        partial.unlink()
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot write there ({error.strerror}); name another file") from None
    return path


def write_report(path: Path, report: Report) -> None:
    """Write a file that is whole or not there.

    Raises:
        EeinferError: it cannot be written.
    """
    path = path.resolve()  # a link stays a link
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def append_report(path: Path, report: Report) -> None:
    """Add the report to a JSONL file as one line.

    Raises:
        EeinferError: it cannot be written.
    """
    line = json.dumps(report, allow_nan=False).encode() + b"\n"
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else b"\n" + line  # a line that was cut off stays alone
            file.write(line)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> EeinferError:
    return EeinferError(f"{path}: cannot write the result: {error.strerror}; free space there or name another file")


def read_report(path: Path, note: Callable[[str], None]) -> Report:
    """The report in a JSON file, or the last one of a JSONL file.

    Args:
        path: a name that ends in .jsonl is read line by line.
        note: told when there was a choice.

    Raises:
        EeinferError: the file is missing, no JSON, no result of this schema version, or incomplete.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EeinferError(f"{path}: cannot read the result: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EeinferError(f"{path}: not UTF-8 text; name a file that eeinfer bench --output wrote") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if path.suffix == ".jsonl" and len(lines) > 1:
        note(f"{path} holds {len(lines)} results; this is the last one")
        text = lines[-1]
    try:
        report = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EeinferError(
            f"{path}: not JSON ({error}); name a file that eeinfer bench wrote, one with several results as .jsonl"
        ) from None
    _check(report, path)
    return dict(report)


def _check(report: Any, path: Path) -> None:
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise EeinferError(f'{path}: not a result of eeinfer bench (no "schema": "{SCHEMA}"); name one with --output')
    if report.get("version") != VERSION:
        raise EeinferError(
            f"{path}: a result file of schema version {report.get('version')}; this eeinfer reads {VERSION}: "
            f"measure again, or read it with the eeinfer that wrote it ({report.get('eeinfer_version')})"
        )
    from pydantic import TypeAdapter, ValidationError

    try:
        contents = TypeAdapter(Contents).validate_python(report)
    except ValidationError as error:
        raise EeinferError(f"{path}: {_complaint(error)}; the file was cut or edited: measure again") from None
    _check_cells(contents.cells, path)


def _check_cells(cells: Sequence[CellEntry], path: Path) -> None:
    groups = {(c.key.batch, c.key.input_len, c.key.output_len) for c in cells if c.key.strategy == "full"}
    for i, cell in enumerate(cells):
        if (cell.key.batch, cell.key.input_len, cell.key.output_len) not in groups:
            raise EeinferError(f"{path}: cells.{i} has no cell of full to compare with; measure again")
        if cell.breakdown is not None and (missing := set(SECTIONS) - set(cell.breakdown)):
            raise EeinferError(f"{path}: cells.{i}.breakdown lacks {', '.join(sorted(missing))}; measure again")


def _complaint(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place} is missing" if first["type"] == "missing" else f"{place}: {first['msg']}"
