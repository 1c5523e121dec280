"""`eeinfer config`: what the settings are and where they come from."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from eeinfer.cli.options import Resolver, takes_settings

config = typer.Typer(help="Look at the settings.", no_args_is_help=True)


@config.command()
@takes_settings()
def show(
    resolve: Resolver,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON by dotted key instead of TOML.")] = False,
) -> None:
    """Print the settings in force, as TOML that `-c` reads.

    What ships with a model's exit heads joins when the model is loaded and is not part of this list.
    """
    loaded = resolve()
    if not as_json:
        typer.echo(loaded.to_toml(origins=origin), nl=False)
        return
    values = {key: _json(value) for key, value in loaded.values().items()}
    with_origin = {key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()}
    typer.echo(json.dumps(with_origin if origin else values, indent=2, ensure_ascii=False))


def _json(value: Any) -> Any:
    """JSON knows no infinity; "inf" is what the environment and --set take too."""
    if isinstance(value, tuple):
        return [_json(v) for v in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
