"""`eeinfer config`: what the settings are, where they come from, and changes to their files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eeinfer.cli.options import Resolver, note, takes_settings

if TYPE_CHECKING:
    from eeinfer.config.load import Loaded
    from eeinfer.config.sources import Source

config = typer.Typer(
    help="Look at the settings and change their files.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="From low to high: built-in defaults, `eeinfer.toml` and `calibration.toml` with the exit heads, the user's "
    "file, the project's file, `-c` files from left to right, the profile, `EEINFER_SECTION__KEY`, `--set`, options.",
)


def _keys(incomplete: str) -> list[tuple[str, str]]:
    """Settings that begin like this, with their help, for shell completion."""
    from eeinfer.config.schema import declared

    return [(key, one.help) for key, one in declared().items() if key.startswith(incomplete)]


Key = Annotated[str, typer.Argument(metavar="KEY", help="A setting, such as exits.threshold.", autocompletion=_keys)]
Keys = Annotated[list[str], typer.Argument(metavar="KEY…", help="Settings.", autocompletion=_keys)]
OfUser = Annotated[bool, typer.Option("--user", help="The user's file, which holds for all work.")]
OfProject = Annotated[bool, typer.Option("--project", help="The project's file.")]
OfProfile = Annotated[str | None, typer.Option("--profile", metavar="NAME", help="A profile in the file.")]


@config.command()
@takes_settings()
def show(
    resolve: Resolver,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON by dotted key instead of TOML.")] = False,
) -> None:
    """Print the settings in force, as TOML that `-c` reads, with those that ship with the model's exit heads."""
    loaded = resolve(_packaged(resolve))
    if not as_json:
        typer.echo(loaded.to_toml(origins=origin), nl=False)
        return
    values = {key: _json(value) for key, value in loaded.values().items()}
    with_origin = {key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()}
    typer.echo(json.dumps(with_origin if origin else values, indent=2, ensure_ascii=False))


@config.command()
@takes_settings("model.name", "model.heads")
def get(
    resolve: Resolver,
    key: Key,
    origin: Annotated[bool, typer.Option("--origin", help="Say where it comes from, after a tab.")] = False,
) -> None:
    """Print one setting in force: text as it is, anything else as TOML."""
    from eeinfer.config.load import toml_value

    _check_key(key)
    loaded: Loaded = resolve(_packaged(resolve))
    value = loaded.values()[key]
    text = value if isinstance(value, str) else toml_value(value)
    typer.echo(f"{text}\t{loaded.origins[key]}" if origin else text)


@config.command("set")
def set_values(
    assignments: Annotated[
        list[str],
        typer.Argument(metavar="KEY VALUE | KEY=VALUE…", help="One setting, or several.", autocompletion=_keys),
    ],
    user: OfUser = False,
    project: OfProject = False,
    profile: OfProfile = None,
) -> None:
    """Write settings to the project's file, or with --user to the user's, which is made if there is none.

    Values are read as those of --set. Comments stay. Nothing is written unless the whole file is valid.
    """
    from eeinfer.config.sources import read_assignments
    from eeinfer.config.validate import validated_text

    if len(assignments) == 2 and "=" not in assignments[0]:  # noqa: PLR2004 - a key and its value
        assignments = ["=".join(assignments)]
    _edit(
        {key: validated_text(key, text, "config set") for key, text, _ in read_assignments(assignments)},
        _file(user, project),
        profile,
    )


@config.command()
def unset(keys: Keys, user: OfUser = False, project: OfProject = False, profile: OfProfile = None) -> None:
    """Take settings out of the project's file, or with --user out of the user's."""
    for key in keys:
        _check_key(key)
    source = _file(user, project)
    if source.path.is_file():
        _edit(dict.fromkeys(keys), source, profile)
    else:
        note(f"{source.path} does not exist: nothing to take out")


@config.command()
def path(user: OfUser = False, project: OfProject = False) -> None:
    """Print the files of settings, the user's and the project's, and which of them exist.

    A project's file is `eeinfer.toml`, or `[tool.eeinfer]` in `pyproject.toml`, in the working folder or, inside a Git
    repository, in the nearest folder up to its root. With --user or --project only that path is printed.
    """
    if user or project:
        typer.echo(_file(user, project).path)
        return
    from eeinfer.config.files import places

    found = places(Path.cwd(), os.environ)
    for source in (found.user, found.project):
        typer.echo(source.origin + ("" if source in found.present() else ", does not exist"))


@config.command()
def init(
    user: OfUser = False,
    project: OfProject = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a file with every setting, its help and its default, all commented out: here, or with --user the user's."""
    from eeinfer.config.edit import new_file
    from eeinfer.config.files import PROJECT_NAME

    file = _file(user, project).path if user else Path.cwd() / PROJECT_NAME
    new_file(file, replace=force)
    typer.echo(file)


@config.command()
def schema() -> None:
    """Print a JSON schema of the files of settings, by which editors complete and check them.

    In VS Code with Even Better TOML, or with taplo, begin a file with `#:schema ./eeinfer.schema.json`.
    """
    from eeinfer.config.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def _check_key(key: str) -> None:
    from eeinfer.config.schema import declared
    from eeinfer.config.suggest import did_you_mean
    from eeinfer.errors import ConfigError

    if key not in declared():
        raise ConfigError(f"unknown key {key!r}{did_you_mean(key, declared())}")


def _file(user: bool, project: bool) -> Source:
    from eeinfer.config.files import places
    from eeinfer.errors import ConfigError

    if user and project:
        raise ConfigError("--user and --project are two files; name one")
    found = places(Path.cwd(), os.environ)
    return found.user if user else found.project


def _edit(edits: dict[str, Any], source: Source, profile: str | None) -> None:
    from eeinfer.config.edit import edit_file

    edit_file(source, edits, profile=profile, note=note)
    note(f"written to {source.path}")


def _packaged(resolve: Resolver) -> Path | None:
    """The settings that ship with the exit heads of the model in question; None, and a notice, when it is not here."""
    from eeinfer.engine.build import locate
    from eeinfer.errors import ModelError

    try:
        return locate(resolve().settings.model, note).packaged_settings
    except ModelError as error:
        note(f"without what may ship with the model's exit heads: {error}")
        return None


def _json(value: Any) -> Any:
    """JSON knows no infinity; "inf" is what the environment and --set take too."""
    if isinstance(value, tuple):
        return [_json(v) for v in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
