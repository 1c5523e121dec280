"""The options that set settings. Each is bound to one dotted key; type, choices and help text come from the schema."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec, get_args, get_origin

import typer

from eeinfer.cli.verbosity import log
from eeinfer.config.schema import declared

if TYPE_CHECKING:
    from eeinfer.config.load import Loaded

P = ParamSpec("P")


class Flag(NamedTuple):
    """How a setting is spelled on the command line; without a metavar Typer shows the type."""

    spellings: tuple[str, ...]
    metavar: str | None = None


# By dotted key, in the order of `--help`. Choices are those of the schema.
FLAGS = {
    "model.name": Flag(("--model", "-m"), "MODEL"),
    "model.heads": Flag(("--heads",), "FOLDER"),
    "model.dtype": Flag(("--dtype",), "NAME"),
    "model.device": Flag(("--device",), "NAME"),
    "model.kernels": Flag(("--kernels",), "NAME"),
    "model.enforce_eager": Flag(("--enforce-eager/--no-enforce-eager",)),
    "exits.layers": Flag(("--exits",), "N,N,…"),
    "exits.threshold": Flag(("--threshold",), "X,X,…"),
    "exits.measure": Flag(("--measure",), "NAME"),
    "exits.decay": Flag(("--decay",)),
    "exits.completion": Flag(("--completion",), "NAME"),
    "batching.strategy": Flag(("--strategy",), "NAME"),
    "batching.max_num_seqs": Flag(("--batch",)),
    "cache.num_blocks": Flag(("--num-blocks",), "N"),
    "cache.block_size": Flag(("--block-size",)),
    "cache.prefix_cache": Flag(("--prefix-cache/--no-prefix-cache",)),
    "sampling.max_tokens": Flag(("--max-tokens",)),
    "sampling.temperature": Flag(("--temperature",)),
    "sampling.top_p": Flag(("--top-p",)),
    "sampling.top_k": Flag(("--top-k",)),
    "sampling.min_p": Flag(("--min-p",)),
    "sampling.repetition_penalty": Flag(("--repetition-penalty",)),
    "sampling.presence_penalty": Flag(("--presence-penalty",)),
    "sampling.frequency_penalty": Flag(("--frequency-penalty",)),
    "sampling.seed": Flag(("--seed",)),
}


@dataclass(slots=True)
class Resolver:
    """What the command line gave, ready to be merged with an `eeinfer.toml` that ships with exit heads.

    Attributes:
        latest: the outcome of the last call: the settings of the run.
    """

    files: list[Path]
    assignments: list[str]
    flags: dict[str, Any]
    profile: str | None = None
    no_config: bool = False
    latest: Loaded | None = field(default=None, init=False)

    def __call__(self, packaged: Path | None = None) -> Loaded:
        """The merged settings.

        Raises:
            ConfigError: see `load_settings`.
        """
        from eeinfer.config.files import places
        from eeinfer.config.load import load_settings

        found = [] if self.no_config else places(Path.cwd(), os.environ).present()
        for source in found:
            log.debug("settings of %s", source.origin)
        self.latest = load_settings(
            places=found,
            files=self.files,
            profile=self.profile,
            assignments=self.assignments,
            flags=self.flags,
            packaged=packaged,
        )
        return self.latest


def note(message: str) -> None:
    """One line for the user, on standard error; none with --quiet."""
    log.info("%s", message)


def takes_settings(*keys: str) -> Callable[[Callable[Concatenate[Resolver, P], None]], Callable[..., None]]:
    """Gives a command `-c`, `--set` and the options of `keys` (default: all), and its body a Resolver for them.

    Options default to None, so that a flag that equals a built-in default still wins over a file.
    """
    names = {_parameter(FLAGS[key]): key for key in keys or FLAGS}

    def decorate(command: Callable[Concatenate[Resolver, P], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(
            *,
            config: list[Path] | None,
            assignments: list[str] | None,
            profile: str | None,
            no_config: bool,
            **own: Any,
        ) -> None:
            flags = {key: value for name, key in names.items() if (value := own.pop(name)) is not None}
            resolver = Resolver(config or [], assignments or [], flags, profile, no_config)
            command(resolver, **own)  # type: ignore[call-arg]

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [*own, *_shared(), *(_setting(name, key) for name, key in names.items())]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(flag: Flag) -> str:
    """The name of its parameter: that of the first spelling, of a switch the one that turns it on."""
    return flag.spellings[0].partition("/")[0].removeprefix("--").replace("-", "_")


def _shared() -> Iterator[inspect.Parameter]:
    config = typer.Option("--config", "-c", metavar="FILE", help="TOML file of settings; repeatable, later files win.")
    assign = typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="One setting, as in a file; repeatable.",
        autocompletion=lambda incomplete: [f"{key}=" for key in declared() if key.startswith(incomplete)],
    )
    profile = typer.Option("--profile", metavar="NAME", envvar="EEINFER_PROFILE", help="A profile of the files.")
    alone = typer.Option("--no-config", help="Leave out the user's and the project's file of settings.")
    yield _keyword("config", Annotated[list[Path] | None, config])
    yield _keyword("assignments", Annotated[list[str] | None, assign])
    yield _keyword("profile", Annotated[str | None, profile])
    yield _keyword("no_config", Annotated[bool, alone], default=False)


def _setting(name: str, key: str) -> inspect.Parameter:
    setting, flag = declared()[key], FLAGS[key]
    kind = _option_type(setting.annotation)
    choices = f" One of {', '.join(get_args(kind))}." if get_origin(kind) is Literal else ""
    option = typer.Option(
        *flag.spellings,
        metavar=flag.metavar,
        help=f"{setting.help}{choices} ({key}, default {setting.default})",
        rich_help_panel=f"Settings: {key.partition('.')[0]}",
        autocompletion=pulled_models if key == "model.name" else None,
    )
    return _keyword(name, Annotated[kind | None, option])


def pulled_models(incomplete: str) -> list[str]:
    """Models of the store that begin like this, for shell completion."""
    from eeinfer.model.store import pulled

    return [name for name in pulled() if name.startswith(incomplete)]


def _option_type(annotation: Any) -> Any:
    """What Typer parses itself: numbers and choices. The rest stays text for the loader (`auto`, comma lists)."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return bare if bare in {int, float, bool} or get_origin(bare) is Literal else str


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
