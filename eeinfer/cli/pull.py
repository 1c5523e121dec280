"""`eeinfer pull`: get a model into the local store."""

from __future__ import annotations

from typing import Annotated

import typer

from eeinfer.cli.options import note
from eeinfer.cli.progress import progress_bars
from eeinfer.model import store


def pull(
    model: Annotated[
        str, typer.Argument(help="The default model's name, a Hub id (org/name), or a local folder to check.")
    ] = store.DEFAULT_MODEL,
) -> None:
    """Get a model into the local store (EEINFER_HOME, else ~/.cache/eeinfer) and print its folder.

    A model that is already there is left as it is; an interrupted pull leaves nothing that looks complete.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with progress_bars(console) as progress:
        folder = store.pull(model, report=note, progress=progress)
    typer.echo(folder)
