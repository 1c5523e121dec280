"""Where the files of settings are that nobody has to name: the user's and the project's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from eeinfer.config.sources import Source, read_table
from eeinfer.errors import ConfigError

PROJECT_NAME = "eeinfer.toml"
PYPROJECT_NAME = "pyproject.toml"
PYPROJECT_TABLE = ("tool", "eeinfer")
HEADS_NAME = "exit_config.json"  # an eeinfer.toml beside it ships with exit heads, and is no project's


class Places(NamedTuple):
    """The files of a user and of a project, and whether they count; where there is none yet, it would be there."""

    user: Source
    project: Source
    has_user: bool
    has_project: bool

    def present(self) -> list[Source]:
        """Those that count, from low to high."""
        return [*([self.user] if self.has_user else []), *([self.project] if self.has_project else [])]


def places(folder: Path, environ: Mapping[str, str]) -> Places:
    """The files of settings for work in `folder`.

    Raises:
        ConfigError: a pyproject.toml on the way is not TOML.
    """
    user = user_folder(environ) / "config.toml"
    project = _project(folder)
    own = folder.resolve() / PROJECT_NAME
    nearest = project or Source(own, f"{own} (project)")
    return Places(Source(user, f"{user} (user)"), nearest, user.is_file(), project is not None)


def user_folder(environ: Mapping[str, str]) -> Path:
    """The user's folder of settings: $XDG_CONFIG_HOME/eeinfer, else ~/.config/eeinfer; on Windows in %APPDATA%."""
    base = environ.get("XDG_CONFIG_HOME") or (environ.get("APPDATA") if sys.platform == "win32" else None)
    try:
        return Path(base or "~/.config").expanduser() / "eeinfer"
    except RuntimeError:  # no HOME, as in some containers
        raise ConfigError("there is no home folder for settings: set XDG_CONFIG_HOME, or pass --no-config") from None


def _project(folder: Path) -> Source | None:
    """The nearest file of a project: in `folder` and, inside a Git repository, in the folders up to its root."""
    for place in _up_to_repository(folder.resolve()):
        own, shared = place / PROJECT_NAME, place / PYPROJECT_NAME
        if own.is_file() and not (place / HEADS_NAME).is_file():
            return Source(own, f"{own} (project)")
        if shared.is_file() and read_table(shared, PYPROJECT_TABLE) is not None:
            return Source(shared, f"{shared} [{'.'.join(PYPROJECT_TABLE)}] (project)", PYPROJECT_TABLE)
    return None


def _up_to_repository(folder: Path) -> Iterator[Path]:
    chain = [folder, *folder.parents]
    roots = [i for i, place in enumerate(chain) if (place / ".git").exists()]
    yield from chain[: roots[0] + 1 if roots else 1]
