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
PROFILE = "profile"  # a table of named sets of settings
INHERITS = "inherits"
# Variables that are not settings: the folder of the model store, the profile, and how much standard error says.
NOT_SETTINGS = ("EEINFER_HOME", "EEINFER_PROFILE", "EEINFER_LOG_LEVEL")

Entries = list[tuple[str, object]]  # dotted keys and values


class Source(NamedTuple):
    """A TOML file of settings: its path, how messages and `--origin` call it, and the table in it that counts."""

    path: Path
    origin: str
    table: tuple[str, ...] = ()


class Profile(NamedTuple):
    """A profile as it stands in one file: its own settings, and the name of the profile beneath it, if any."""

    entries: Entries
    inherits: str | None


class Contents(NamedTuple):
    """What a file holds: settings in its order, `[calibration]` if it is a calibration file, and its profiles."""

    entries: Entries
    calibration: Mapping[str, Any] | None
    profiles: Mapping[str, Profile]


def read_file(source: Source) -> Contents:
    """What a TOML file holds.

    Raises:
        ConfigError: the file cannot be read, is not TOML (with line and column) or has an unknown section or key.
    """
    return contents(read_table(source.path, source.table) or {}, source.path)


def read_table(path: Path, table: tuple[str, ...]) -> dict[str, Any] | None:
    """A table of a TOML file, by default all of it; None when the file has no such table.

    Raises:
        ConfigError: the file cannot be read or is not TOML, or something else has the table's name.
    """
    found = _parse(path)
    for depth, name in enumerate(table, start=1):
        if name not in found:
            return None
        below = found[name]
        if not isinstance(below, dict):
            raise ConfigError(f"{path}: {'.'.join(table[:depth])} is a table; write [{'.'.join(table)}]")
        found = below
    return found


def contents(document: Mapping[str, Any], path: Path) -> Contents:
    """The parts of a parsed file; `path` is for messages.

    Raises:
        ConfigError: an unknown section or key.
    """
    special = {name: document.get(name) for name in (CALIBRATION, PROFILE)}
    for name, table in special.items():
        if not isinstance(table, dict | None):
            what = "of calibration files" if name == CALIBRATION else "of profiles"
            raise ConfigError(f"{path}: {name} is a table {what}; write [{name}{'.NAME' * (name == PROFILE)}]")
    sections = {name: table for name, table in document.items() if name not in special}
    profiles = {name: _profile(path, name, table) for name, table in (special[PROFILE] or {}).items()}
    return Contents(_entries(path, sections), special[CALIBRATION], profiles)


def _profile(path: Path, name: str, table: object) -> Profile:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: profile.{name} is a table; write [profile.{name}.SECTION] and its keys below it")
    inherits = table.get(INHERITS)
    if not isinstance(inherits, str | None):
        raise ConfigError(f"{path}: profile.{name}.{INHERITS} must be the name of a profile; got {inherits!r}")
    sections = {section: own for section, own in table.items() if section != INHERITS}
    return Profile(_entries(path, sections, f"{PROFILE}.{name}."), inherits)


def _entries(path: Path, document: Mapping[str, Any], prefix: str = "") -> Entries:
    known = declared()
    sections = dict.fromkeys(key.partition(".")[0] for key in known)
    entries: Entries = []
    for section, table in document.items():
        if section not in sections:
            _unknown_section(path, prefix, section, table, sections)
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {prefix}{section} is a section; write [{prefix}{section}] and its keys below it"
            )
        for name, value in table.items():
            if (key := f"{section}.{name}") not in known:
                raise ConfigError(f"{path}: unknown key {prefix + key!r}{did_you_mean(key, known)}")
            entries.append((key, value))
    return entries


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


def _unknown_section(path: Path, prefix: str, section: str, table: object, sections: Mapping[str, None]) -> None:
    if isinstance(table, dict):
        names = [*sections] if prefix else [*sections, PROFILE]
        raise ConfigError(f"{path}: unknown section {prefix + section!r}{did_you_mean(section, names)}")
    raise ConfigError(f"{path}: unknown key {prefix + section!r}{did_you_mean(section, declared())}")
