"""`eeinfer generate`: answers to a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from eeinfer.cli.options import Resolver, note, takes_settings
from eeinfer.errors import EeinferError

if TYPE_CHECKING:
    from eeinfer.core.request import Request
    from eeinfer.engine.prompt_file import LineError


@takes_settings()
def generate(
    resolve: Resolver,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-", show_default="about 300 packaged prompts", help="JSON Lines; - is standard input."
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE|-", help="Where the answers go; - is standard output.")
    ] = "-",
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    token_details: Annotated[
        bool, typer.Option("--token-details", help="Add id, text, depth and confidence of every token.")
    ] = False,
    show_exits: Annotated[
        bool, typer.Option("--show-exits", help="Print the answers with each token coloured by the depth it left at.")
    ] = False,
) -> None:
    """Answer a file of prompts, in batches, with early exit.

    A line of the prompt file is an object with prompt (text) or messages (chat), and optionally id, max_tokens,
    temperature, seed, stop and vLLM's other sampling parameters, such as top_p, logprobs and n; or it is a line of an
    OpenAI batch file. Answers come as one JSON object a line, in the order of the prompts; a bad line gets an error
    line of its own and the others run. Progress and a summary go to standard error. Beside --output FILE, the settings
    of the run are kept as FILE.settings.toml.
    """
    from eeinfer.engine.prompt_file import PACKAGED_PROMPTS, read_prompt_file

    settings = resolve().settings  # bad settings are told before any work
    if prompts is None:
        note("no --prompts given: answering the packaged ones")
    source = PACKAGED_PROMPTS if prompts is None else Path(prompts)
    destination = None if output == "-" else _destination(Path(output), source)
    stream = sys.stdin.buffer if prompts == "-" else source
    entries = read_prompt_file(stream, limit=num_prompts, model=settings.model.name)
    with _opened(destination) as file:
        lines = None if show_exits and destination is None else file
        failures = _answer(entries, resolve, lines, token_details=token_details, show_exits=show_exits)
    if destination and destination.is_file() and resolve.latest:
        kept = destination.with_name(f"{destination.name}.settings.toml")
        kept.write_text(resolve.latest.to_toml(), encoding="utf-8")
    if failures:
        note(f"{len(failures)} of {len(entries)} prompts failed; the first: {failures[0]}")
        raise typer.Exit(1)


def _answer(
    entries: Sequence[Request | LineError],
    resolve: Resolver,
    lines: BinaryIO | None,
    *,
    token_details: bool,
    show_exits: bool,
) -> list[str]:
    """Load the model, unless every line is bad, and answer. Returns what failed."""
    from rich.console import Console

    from eeinfer.cli.answers import AnswerWriter
    from eeinfer.cli.meter import Meter, summary
    from eeinfer.cli.show import DepthPainter, shows_colours
    from eeinfer.core.request import Request

    requests = [entry for entry in entries if isinstance(entry, Request)]
    llm = None
    if requests:
        from eeinfer.engine.llm import LLM  # here, so that a file of bad lines alone is told without loading torch

        llm = LLM.from_loaded(resolve, note=note)
    console = Console()
    exits, num_layers = (llm.exits, llm.num_layers) if llm else ((), 0)
    painter = DepthPainter(exits, num_layers, shows_colours(console))
    meter = Meter(sum(request.sampling.n for request in requests))
    writer = AnswerWriter(lines, console if show_exits else None, painter, meter, bool(exits), token_details)
    for i, entry in enumerate(entries):
        if not isinstance(entry, Request):
            writer.put(i, entry, entry)
    if llm:
        places = {entry.id: i for i, entry in enumerate(entries) if isinstance(entry, Request)}
        with meter.running():
            llm.generate(
                requests,
                on_output=lambda out: writer.put(places[out.id], out, entries[places[out.id]]),
                on_step=meter.step,
            )
        writer.close()
        note(summary(llm.stats, num_layers=num_layers, depths=writer.depths))
    return writer.failures


def _destination(path: Path, source: Path) -> Path:
    """The file to write, a link followed to its target; refused before any work when it cannot be.

    Raises:
        EeinferError: it is a folder, in a missing folder, or the prompt file itself.
    """
    path = path.resolve()
    if path.is_dir():
        raise EeinferError(f"--output {path}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise EeinferError(f"--output {path}: the folder {path.parent} does not exist; create it first")
    if path.exists() and source.exists() and path.samefile(source):
        raise EeinferError(f"--output {path}: this is the prompt file; name another")
    return path


@contextmanager
def _opened(destination: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a `.partial` file beside the destination that takes its name when all is written."""
    if destination is None:
        if sys.stdout is None:
            raise EeinferError("standard output is closed; name a file with --output")
        yield sys.stdout.buffer
        return
    whole = destination.exists() and not destination.is_file()  # a device or a pipe takes the bytes as they come
    partial = destination if whole else destination.with_name(f"{destination.name}.partial")
    try:
        file = partial.open("wb")
    except OSError as error:
        raise EeinferError(f"--output {destination}: cannot write {partial}: {error.strerror}") from None
    try:
        with file:
            yield file
    except BaseException:
        _keep_or_drop(partial)
        raise
    if partial != destination:
        partial.replace(destination)


def _keep_or_drop(partial: Path) -> None:
    if partial.is_file() and partial.stat().st_size == 0:
        partial.unlink()
    elif partial.is_file():
        note(f"stopped early; the answers so far are in {partial}")
