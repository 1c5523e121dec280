"""`eeinfer pull`: get a model into the local store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from eeinfer.cli.options import note
from eeinfer.cli.verbosity import is_quiet
from eeinfer.model import store

if TYPE_CHECKING:
    from rich.console import Console

    from eeinfer.model.gguf_import import Progress


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
    with _progress(console) as progress:
        folder = store.pull(model, report=note, progress=progress)
    typer.echo(folder)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for each label on a terminal, else one plain line when a label begins and one when it is done."""
    if is_quiet() or not console.is_terminal:
        yield _plain()
        return
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console) as bars:

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)

        yield update


def _plain() -> Progress:
    said: set[str] = set()

    def update(label: str, done: int, total: int) -> None:
        line = f"{label}: done" if done == total else f"{label} …"
        if line not in said:
            said.add(line)
            note(line)

    return update
