"""How much standard error says: notices and progress, which can be silenced, and errors, which cannot."""

from __future__ import annotations

import logging
import warnings
from typing import Annotated, Any, Literal, get_args

import typer

Level = Literal["debug", "info", "warning", "error"]

log = logging.getLogger("eeinfer")


def is_quiet() -> bool:
    """Whether notices and progress are silenced."""
    return not log.isEnabledFor(logging.INFO)


def speak(level: str) -> None:
    """Say what is of `level` or above: notices from `info` on, and of libraries warnings alone unless `debug`.

    Raises:
        ConfigError: there is no such level.
    """
    if level not in get_args(Level):
        from eeinfer.config.suggest import did_you_mean
        from eeinfer.errors import ConfigError

        raise ConfigError(f"EEINFER_LOG_LEVEL: unknown level {level!r}{did_you_mean(level, get_args(Level))}")
    own = logging.getLevelNamesMapping()[level.upper()]
    log.setLevel(own)
    root = logging.getLogger()
    root.setLevel(own if own != logging.INFO else logging.WARNING)
    if _HANDLER not in root.handlers:
        root.addHandler(_HANDLER)
    if own > logging.WARNING:
        warnings.simplefilter("ignore")


class _StandardError(logging.Handler):
    """Plain lines; those of libraries and of `debug` say where they are from."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        own = record.name == log.name and record.levelno >= logging.INFO
        origin = "" if own else f"{record.levelname.lower()}: {record.name}: "
        typer.echo(f"{origin}{record.getMessage()}", err=True)


_HANDLER = _StandardError()


def _as_asked(level: str | None) -> None:
    if level is not None:
        speak(level)


def _silent(quiet: bool) -> None:
    if quiet:
        speak("error")


def options() -> list[Any]:
    """The options of every command: `--quiet` and `--log-level`. They act at once and hand nothing on."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(
        quiet: Annotated[
            bool, typer.Option("--quiet", "-q", callback=_silent, is_eager=True, help="No notices and no progress.")
        ] = False,
        log_level: Annotated[
            Level | None,
            typer.Option(
                callback=_as_asked,
                is_eager=True,
                metavar="NAME",
                help="What standard error says: debug, info, warning or error. (EEINFER_LOG_LEVEL, default info)",
            ),
        ] = None,
    ) -> None:
        pass

    found = typer.main.get_command(app).params
    for option in found:
        option.expose_value = False
    return list(found)
