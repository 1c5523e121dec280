"""`eeinfer generate`: answers to a file of prompts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from eeinfer.cli.options import Resolver, note, takes_settings
from eeinfer.cli.prompt_source import prompt_source
from eeinfer.cli.verbosity import log
from eeinfer.errors import EeinferError

Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", show_default="about 300 packaged prompts", help="JSON Lines; - is standard input."),
]
Output = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE|-", help="Where the answers go; - is standard output.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the answers that an interrupted run left in FILE.journal.")
]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")]
TokenDetails = Annotated[
    bool, typer.Option("--token-details", help="Add id, text, depth and confidence of every token.")
]
ShowExits = Annotated[
    bool, typer.Option("--show-exits", help="Print the new answers with each token coloured by the depth it left at.")
]
StatsFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the figures of the run as JSON: requests, time, counters.")
]


@takes_settings()
def generate(
    resolve: Resolver,
    prompts: Prompts = None,
    output: Output = "-",
    resume: Resume = False,
    num_prompts: NumPrompts = None,
    token_details: TokenDetails = False,
    show_exits: ShowExits = False,
    stats: StatsFile = None,
) -> None:
    """Answer a file of prompts, in batches, with early exit.

    A line of the prompt file is an object with prompt (text) or messages (chat), and optionally id, max_tokens,
    temperature, seed, stop and vLLM's other sampling parameters, such as top_p, logprobs and n; or it is a line of an
    OpenAI batch file. Answers come as one JSON object a line, in the order of the prompts; a bad line gets an error
    line of its own and the others run. Progress and a summary go to standard error.

    With --output FILE, answers gather in FILE.journal, and FILE appears when all are there, beside FILE.settings.toml
    with the settings of the run; after an interruption, the same command with --resume goes on. Ctrl-C once finishes
    the answers in progress, twice stops at once; no finished answer is lost.
    """
    from eeinfer.cli.output import open_output, output_path, stats_path
    from eeinfer.cli.run import Run
    from eeinfer.engine.prompt_file import PACKAGED_PROMPTS, read_prompt_file

    settings = resolve().settings  # bad settings are told before any work
    if prompts is None:
        note("no --prompts given: answering the packaged ones")
    source = PACKAGED_PROMPTS if prompts is None else Path(prompts)
    target = output_path(output, source, resume=resume)
    figures_file = None if stats is None else stats_path(stats, source, target)
    lines_in = source if prompts is None else prompt_source(prompts)
    entries = read_prompt_file(lines_in, limit=num_prompts, model=settings.model.name)
    with open_output(target, resume=resume) as out:
        lines = None if show_exits and target is None else out
        run = Run(entries, resolve, lines, token_details=token_details, show_exits=show_exits)
        run.prepare(resume=resume)
        try:
            run.answer()
            run.publish()
        except BaseException:
            with suppress(OSError, EeinferError):  # what went wrong first is what counts
                run.report(figures_file)
            raise
        run.report(figures_file)
    if failures := run.failures:
        where = "standard input" if prompts == "-" else source
        log.error(
            "%d of %d prompts failed; the first: %s, %s", len(failures), len(entries), where, failures[min(failures)]
        )
        raise typer.Exit(1)
