"""`eeinfer config`: what the settings are and where they come from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from eeinfer.cli.options import Resolver, note, takes_settings

config = typer.Typer(help="Look at the settings.", no_args_is_help=True)


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
