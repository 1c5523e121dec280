"""Reading of the sources of settings: TOML files, environment variables, assignments. Checks names, not values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eeinfer.config.schema import declared
from eeinfer.config.suggest import did_you_mean
from eeinfer.errors import ConfigError

ENV_PREFIX = "EEINFER_"
CALIBRATION = "calibration"  # a table that is no settings: what a calibration file certifies, and for what
NOT_SETTINGS = ("EEINFER_HOME",)  # variables that are not settings; HOME is the folder of the model store


class Contents(NamedTuple):
    """Dotted keys and values of a file in its order, and its table `[calibration]` if it is a calibration file."""

    entries: list[tuple[str, object]]
    calibration: Mapping[str, Any] | None


def read_file(path: Path) -> Contents:
    """What a TOML file holds.

    Raises:
        ConfigError: the file cannot be read, is not TOML (with line and column) or has an unknown section or key.
    """
    known = declared()
    sections = dict.fromkeys(key.partition(".")[0] for key in known)
    entries: list[tuple[str, object]] = []
    document = _parse(path)
    calibration = document.pop(CALIBRATION, None)
    if calibration is not None and not isinstance(calibration, dict):
        raise ConfigError(f"{path}: {CALIBRATION} is a table of calibration files; write [{CALIBRATION}]")
    for section, table in document.items():
        if section not in sections:
            _unknown_section(path, section, table, sections)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is a section; write [{section}] and its keys below it")
        for name, value in table.items():
            if f"{section}.{name}" not in known:
                _unknown_key(path, section, name)
            entries.append((f"{section}.{name}", value))
    return Contents(entries, calibration)


def read_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(dotted key, text, origin) of each variable that starts with `EEINFER_`.

    Raises:
        ConfigError: a variable with the prefix is no setting.
    """
    keys = {ENV_PREFIX + key.replace(".", "__").upper(): key for key in declared()}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in NOT_SETTINGS:
            continue
        if name not in keys:
            raise ConfigError(f"environment: unknown variable {name}{did_you_mean(name, [*keys, *NOT_SETTINGS])}")
        yield keys[name], environ[name], f"environment {name}"


def read_assignments(assignments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(dotted key, text, origin) of each `section.key=value`.

    Raises:
        ConfigError: no `=`, or an unknown key.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {assignment}: expected section.key=value")
        if key not in declared():
            raise ConfigError(f"--set {assignment}: unknown key {key!r}{did_you_mean(key, declared())}")
        yield key, text.strip(), "--set"


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Windows editors put a byte order mark first
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError(_syntax_error(path, text, str(error))) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be settings") from None


def _syntax_error(path: Path, text: str, message: str) -> str:
    what, _, where = message.rpartition(" (at ")
    position = re.fullmatch(r"line (\d+), column (\d+)\)", where)
    if position:
        line, column = position.groups()
    else:  # tomllib says "at end of document"
        rows = text.split("\n")
        line, column = str(len(rows)), str(len(rows[-1]) + 1)
    return f"{path}, line {line}, column {column}: not valid TOML: {what or message}"


def _unknown_section(path: Path, section: str, table: object, sections: Mapping[str, None]) -> None:
    if isinstance(table, dict):
        raise ConfigError(f"{path}: unknown section {section!r}{did_you_mean(section, sections)}")
    raise ConfigError(f"{path}: unknown key {section!r}{did_you_mean(section, declared())}")


def _unknown_key(path: Path, section: str, name: str) -> None:
    key = f"{section}.{name}"
    raise ConfigError(f"{path}: unknown key {key!r}{did_you_mean(key, declared())}")
