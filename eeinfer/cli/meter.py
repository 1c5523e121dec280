"""What standard error shows of a run: a progress bar while it lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from eeinfer.cli.options import note
from eeinfer.cli.verbosity import is_quiet

if TYPE_CHECKING:
    from eeinfer.engine.engine import Stats

_TABLE_WIDTH = 140


class Meter:
    """Answers given, tokens/s and mean depth, on standard error while that is a terminal; gone when the run ends."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
        # Redirecting standard output, rich would send the answers to standard error.
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4)
        self._task = self._bar.add_task("", total=total, pace="")
        # FORCE_COLOR makes no terminal of a log file.
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._wanted = terminal and console.is_interactive and not is_quiet()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Shows the bar."""
        if not self._wanted:
            yield
            return
        self._bar.start()
        try:
            yield
        finally:
            self._bar.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Takes the bar away for the time of a write, which may go to the same terminal."""
        if not self._bar.live.is_started:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def step(self, stats: Stats) -> None:
        """Shows the counters of the engine."""
        depth = "" if stats.mean_layers is None else f", {stats.mean_layers:.1f} layers a token"
        pace = f"{stats.tokens_per_second:.1f} tokens/s{depth}"
        self._bar.update(self._task, completed=stats.finished + stats.failed, pace=pace)


@contextmanager
def what_runs() -> Iterator[Callable[[str], None]]:
    """Takes what is about to run: a line that goes away on a terminal, a line each elsewhere; on standard error."""
    console = Console(stderr=True)
    if is_quiet() or not console.is_terminal:
        yield note
        return
    with console.status("") as status:
        yield status.update


def table_console() -> Console:
    """For tables on standard output; wide where that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_TABLE_WIDTH)
