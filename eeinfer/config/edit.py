"""Changes to a file of settings, with its comments and its order kept.

The text is changed line by line and read back: only when that gives just what was wanted is it written. A file that is
laid out in another way (inline tables, dotted keys) is written anew.
"""

from __future__ import annotations

import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Any

import tomli_w

from eeinfer.config.load import check_file, toml_value
from eeinfer.config.schema import declared
from eeinfer.config.sources import Source, contents, read_table
from eeinfer.errors import ConfigError

Edits = Mapping[str, Any]  # by dotted key; None takes the setting out of the file


def edit_file(source: Source, edits: Edits, *, profile: str | None, note: Callable[[str], None]) -> None:
    """Change settings of a file, whole or not at all. A file that is not there is made.

    Args:
        source: the file, and the table in it that holds the settings.
        edits: validated values by dotted key; None takes one out.
        profile: the profile to change in place of the settings themselves.
        note: told when comments are lost.

    Raises:
        ConfigError: the file is not one of settings, cannot be written, or has to be changed by hand.
    """
    path = source.path.resolve()  # a link stays a link
    there = path.is_file()
    before = (read_table(path, ()) or {}) if there else {}
    contents(_inner(before, source.table), path)  # what is wrong with the file is told before it is changed
    text = path.read_bytes().decode("utf-8-sig") if there else ""
    prefix = (*source.table, *(("profile", profile) if profile else ()))
    after = deepcopy(before)
    for key, value in edits.items():
        _apply(after, (*prefix, *key.split(".")), value)
        text = _edited(text, (*prefix, key.partition(".")[0]), key.partition(".")[2], value)
    check_file(source, contents(_inner(after, source.table), path))
    if _parsed(text) != after:
        text = _anew(source, after, note, commented="#" in text)
    _write(path, text)


def _inner(document: Mapping[str, Any], table: tuple[str, ...]) -> Mapping[str, Any]:
    for name in table:
        document = document.get(name, {})
    return document


def _apply(document: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    *tables, name = place
    for table in tables:
        if value is None and table not in document:
            return
        document = document.setdefault(table, {})
    if value is None:
        document.pop(name, None)
    else:
        document[name] = list(value) if isinstance(value, tuple) else value


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


def _edited(text: str, table: tuple[str, ...], name: str, value: Any) -> str:
    """The text with `name = value` in `[table]`, or without `name` there, where lines alone can tell what is what."""
    lines = text.splitlines()
    start, stop = _extent(lines, table)
    line = [] if value is None else [f"{name} = {toml_value(value)}"]
    if start is None:
        head = [*([""] if lines else []), f"[{'.'.join(map(_key, table))}]"]
        return _joined([*lines, *(head if line else []), *line])
    for first in range(start, stop):
        if re.match(rf"\s*{re.escape(name)}\s*=", lines[first]):
            last = _end_of_statement(lines, first, stop)
            comment = _comment(lines[last], "\n".join(lines[first:last]))
            return _joined([*lines[:first], *(f"{one}{comment}" for one in line), *lines[last + 1 :]])
    return _joined([*lines[: (place := _place(lines, start, stop, name))], *line, *lines[place:]])


def _place(lines: list[str], start: int, stop: int, name: str) -> int:
    """Where a new setting goes: below its own line that is commented out, else at the end of the table."""
    for i in range(start, stop):
        if re.match(rf"\s*#\s*{re.escape(name)}\s*=", lines[i]):
            return i + 1
    while stop > start and not lines[stop - 1].strip():
        stop -= 1  # blank lines stay between this table and the next
    return stop


def _extent(lines: list[str], table: tuple[str, ...]) -> tuple[int | None, int]:
    """The lines of a table's body; None for the first when the table has no header."""
    header = re.compile(r"\s*\[\s*" + r"\s*\.\s*".join(re.escape(_key(part)) for part in table) + r"\s*\]\s*(#.*)?")
    start = next((i + 1 for i, line in enumerate(lines) if header.fullmatch(line)), None)
    rest = range(len(lines) if start is None else start, len(lines))
    return start, next((i for i in rest if re.match(r"\s*\[", lines[i])), len(lines))


def _end_of_statement(lines: list[str], first: int, stop: int) -> int:
    """The last line of the statement that begins at `first`: a list may go over several."""
    texts = accumulate(lines[first:stop], lambda above, line: f"{above}\n{line}")
    return next((first + i for i, text in enumerate(texts) if _parsed(text) is not None), first)


def _comment(line: str, above: str) -> str:
    """The comment at the end of a statement's last line, with the space before it."""
    whole = _parsed(f"{above}\n{line}")
    for match in re.finditer(r"\s*#", line):
        if _parsed(f"{above}\n{line[: match.start()]}") == whole:
            return line[match.start() :]
    return ""


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n" if lines else ""


def _anew(source: Source, document: dict[str, Any], note: Callable[[str], None], *, commented: bool) -> str:
    if source.table:
        raise ConfigError(f"{source.path}: its [{'.'.join(source.table)}] cannot be changed in place; edit it by hand")
    if commented:
        note(f"{source.path} could not be changed in place: it is written anew, without its comments")
    return tomli_w.dumps(document)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", newline="\n", delete=False
        ) as file:
            partial = Path(file.name)
        try:
            partial.write_text(text, encoding="utf-8", newline="\n")
            partial.chmod(path.stat().st_mode if path.exists() else 0o644)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose a folder that you may write") from None


def new_file(path: Path, *, replace: bool) -> None:
    """Write a file with every setting in it, commented out, with its help and its default.

    Raises:
        ConfigError: there is a file already and it is not to be replaced, or it cannot be written.
    """
    if path.exists() and not replace:
        raise ConfigError(
            f"{path} is there already: change it with `eeinfer config set`, or pass --force to replace it"
        )
    lines = ["# Settings of eeinfer; a line counts without its leading #. `eeinfer config show --origin` shows all."]
    section = ""
    for key, (_, default, help_text) in declared().items():
        above, (section, _, name) = section, key.partition(".")
        if section != above:
            lines += ["", f"[{section}]"]
        lines += [f"# {help_text}", f"# {name} = {toml_value(default)}"]
    _write(path, _joined(lines))
