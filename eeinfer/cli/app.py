"""The `eeinfer` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from eeinfer.cli.bench import bench
from eeinfer.cli.calibrate import calibrate_thresholds
from eeinfer.cli.config import config
from eeinfer.cli.convert import convert
from eeinfer.cli.doctor import doctor
from eeinfer.cli.examples import command_line
from eeinfer.cli.generate import generate
from eeinfer.cli.inspect import inspect
from eeinfer.cli.pull import pull
from eeinfer.cli.tune_heads import tune_heads
from eeinfer.cli.verbosity import speak
from eeinfer.errors import EeinferError

BAD_RUN = 2
INTERRUPTED = 130

app = typer.Typer(
    name="eeinfer",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well, 1 some requests failed or a check of `doctor` did, 2 nothing ran (bad settings, "
    "model or file) or the output cannot be written, 130 interrupted.",
)
app.command()(pull)
app.command()(convert)
app.command()(generate)
app.command("tune-heads")(tune_heads)
app.command("calibrate-thresholds")(calibrate_thresholds)
app.add_typer(bench, name="bench")
app.command()(inspect)
app.command()(doctor)
app.add_typer(config, name="config")


def _version(asked: bool) -> None:
    if asked:
        from eeinfer import __version__

        typer.echo(f"eeinfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve early-exit language models in batches."""


def main() -> None:
    """Run the command line. What a user can cause ends in one plain line on standard error."""
    # Before torch loads OpenMP: its threads spin for milliseconds at every barrier, and where another process has one
    # of the cores that made the engine 5 to 30 times slower. Short spins cost some 4 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows ?
    try:
        speak(os.environ.get("EEINFER_LOG_LEVEL") or "info")
        command_line(app)()
    except EeinferError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(BAD_RUN)
    except OSError as error:  # a full disk; Typer has dealt with a reader that went away
        typer.echo(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
        sys.exit(BAD_RUN)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
