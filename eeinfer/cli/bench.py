"""`eeinfer bench`: one report of speed and quality."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eeinfer.cli.options import Resolver, note, takes_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eeinfer.bench.curve import Curve
    from eeinfer.bench.options import Given
    from eeinfer.bench.report import Report
    from eeinfer.config.schema import Settings
    from eeinfer.errors import EeinferError

INTERRUPTED = 130
# Settings that say nothing about a benchmark: cells have their own, requests are greedy and of the length asked for.
_SET_BY_CELLS = {
    "batching.strategy",
    "batching.max_num_seqs",
    "exits.layers",
    "exits.threshold",
    "sampling.max_tokens",
    "sampling.temperature",
}

Texts = list[str] | None
Batch = Annotated[
    Texts, typer.Option(metavar="N,N,…", show_default="max_num_seqs", help="Most sequences in flight; a list sweeps.")
]
Strategies = Annotated[
    Texts,
    typer.Option(metavar="NAME,…", show_default="all-exit,split", help="Compared with full, which always runs first."),
]
Exits = Annotated[
    Texts,
    typer.Option(
        metavar="N,N,…", show_default="those of the heads", help="Exits as counts of layers run; repeat to sweep."
    ),
]
Thresholds = Annotated[
    Texts,
    typer.Option(
        metavar="X,X,…", show_default="packaged", help="One for all exits or one per exit; repeat the option to sweep."
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", show_default="packaged prompts", help="JSON Lines, as for generate; - is stdin."),
]
InputLen = Annotated[
    Texts, typer.Option(metavar="N,N,…", help="Random token ids of this length instead of prompts; a list sweeps.")
]
OutputLen = Annotated[
    Texts, typer.Option(metavar="N,N,…", show_default="32", help="Most new tokens a request; a list sweeps.")
]
NumPrompts = Annotated[
    int | None, typer.Option(min=1, show_default="the batch, at least 8", help="Requests in each run.")
]
Warmup = Annotated[int, typer.Option(min=0, help="Short rounds before those that count; reported, not counted.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds that count.")]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--stop-at-eos",
        show_default="ignore for random ids alone",
        help="Whether every answer gets its full length.",
    ),
]
SimulateExits = Annotated[
    str | None,
    typer.Option(
        metavar="RATE@N,…",
        help="Rows are ready at these cumulative rates (0.3@15,0.5@22), whatever the check says; it still runs.",
    ),
]
ReplayTrace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Rows leave where they left in these answers of generate --token-details."),
]
RandomWeights = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Weights made up in a known shape, such as llama-3.1-8b."),
]
JudgeQuality = Annotated[
    bool, typer.Option("--quality/--no-quality", help="Judge the answers by the model at full depth.")
]
Roofline = Annotated[bool, typer.Option("--roofline", help="Measure what memory and arithmetic could give at best.")]
WantCurve = Annotated[
    bool, typer.Option("--curve", help="Speed-up against loss over thresholds (a grid, unless --threshold is given).")
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the curve as .png or .svg (needs eeinfer[bench]); implies it.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="The report as JSON, with every repeat.")
]
Append = Annotated[Path | None, typer.Option(metavar="FILE", help="The report as one more line of a JSONL file.")]
Format = Annotated[Literal["table", "md", "csv", "json"], typer.Option("--format", help="Of standard output.")]

bench = typer.Typer(
    invoke_without_command=True, rich_markup_mode="markdown", context_settings={"help_option_names": ["-h", "--help"]}
)


@bench.callback()
@takes_settings(
    "model.name",
    "model.heads",
    "model.dtype",
    "model.device",
    "model.kernels",
    "model.enforce_eager",
    "exits.measure",
    "exits.completion",
    "cache.num_blocks",
    "cache.block_size",
    "cache.prefix_cache",
    "sampling.seed",
)
def measure(
    resolve: Resolver,
    context: typer.Context,
    batch: Batch = None,
    strategy: Strategies = None,
    exits: Exits = None,
    threshold: Thresholds = None,
    prompts: Prompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_prompts: NumPrompts = None,
    warmup: Warmup = 1,
    repeats: Repeats = 3,
    ignore_eos: IgnoreEos = None,
    simulate_exits: SimulateExits = None,
    replay_trace: ReplayTrace = None,
    random_weights: RandomWeights = None,
    quality: JudgeQuality = True,
    roofline: Roofline = False,
    curve: WantCurve = False,
    plot: Plot = None,
    output: Output = None,
    append: Append = None,
    form: Format = "table",
) -> None:
    """Measure strategies side by side: speed, depth, agreement with the full model, latency, memory.

    Strategies take turns in one process on the same requests. All requests arrive at the start, as in `vllm bench
    throughput`; TTFT runs from there, and TPOT leaves out the first token. Decoding is greedy.

    `eeinfer bench compare A.json B.json` compares two reports.
    """
    if context.invoked_subcommand is not None:
        return
    from eeinfer.bench.options import Given

    _check_files(output, append, plot)
    given = Given(
        batch=batch or (),
        strategy=strategy or (),
        exits=exits or (),
        threshold=threshold or (),
        input_len=input_len or (),
        output_len=output_len or (),
        prompts=prompts,
        num_prompts=num_prompts,
        warmup=warmup,
        repeats=repeats,
        ignore_eos=ignore_eos,
        simulate_exits=simulate_exits,
        replay_trace=replay_trace,
        random_weights=random_weights,
        quality=quality,
        roofline=roofline,
        curve=curve or plot is not None,
    )
    _execute(given, resolve, form, output, append, plot)


@bench.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A report of bench --output.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another; ratios are B over A.")],
) -> None:
    """Compare two reports: ratios of the cells that both have, and what else differs between them."""
    from eeinfer.bench.compare import print_comparison
    from eeinfer.bench.report import read_report
    from eeinfer.cli.meter import table_console

    print_comparison(read_report(first, note), read_report(second, note), table_console())


def _check_files(output: Path | None, append: Path | None, plot: Path | None) -> None:
    """Files that could not be written are told before any work."""
    from eeinfer.bench.report import check_destination
    from eeinfer.errors import ConfigError

    if output is not None and append is not None and output.resolve() == append.resolve():
        raise ConfigError(f"--output and --append are both {output}: one is a whole file, the other a log; name two")
    for path, option in ((output, "--output"), (append, "--append"), (plot, "--plot")):
        if path is not None:
            check_destination(path, option)
    if plot is not None:
        from eeinfer.bench.plot import check_plot

        check_plot(plot)


def _execute(
    given: Given, resolve: Resolver, form: str, output: Path | None, append: Path | None, plot: Path | None
) -> None:
    given.options(resolve().settings)  # what is wrong with the options is told before torch is loaded
    report, failure = _run(given, resolve)
    found = _curves(report) if given.curve else []
    _show(report, form, found)
    if any(cell["repeats"] for cell in report["cells"]):
        _deliver(report, output, append, plot if found else None)
    if failure is not None:
        raise failure
    if report["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _run(given: Given, resolve: Resolver) -> tuple[Report, EeinferError | None]:
    """The report, and what ended the run early."""
    from eeinfer.bench.collect import collect
    from eeinfer.bench.subject import load_subject, locate_random
    from eeinfer.bench.suite import Suite
    from eeinfer.cli.meter import what_runs
    from eeinfer.engine.build import locate

    model = resolve().settings.model
    located = locate_random(given.random_weights) if given.random_weights else locate(model, note)
    packaged = located.packaged_settings
    loaded = resolve(packaged)
    options = given.options(loaded.settings)

    def settings_of(cell: Mapping[str, Any]) -> Settings:
        return replace(resolve, flags={**resolve.flags, **cell})(packaged).settings

    suite = Suite(options, located, settings_of, note)
    subject = load_subject(model, located, options.seed, note)
    with what_runs() as progress:
        suite.run(subject, progress)
    if suite.interrupted:
        note("interrupted: the report holds the rounds that were complete")
    settings = {key: value for key, value in loaded.values().items() if key not in _SET_BY_CELLS}
    return collect(suite, subject, command=sys.argv, settings=settings), suite.failure


def _deliver(report: Report, output: Path | None, append: Path | None, plot: Path | None) -> None:
    from eeinfer.bench.report import append_report, write_report

    if output is not None:
        write_report(output, report)
    if append is not None:
        append_report(append, report)
    if plot is not None:
        from eeinfer.bench.plot import plot_curve

        plot_curve(report, plot)


def _curves(report: Report) -> list[Curve]:
    """The curves of a report, which gains them; none when it was interrupted before there was one."""
    from eeinfer.bench.curve import curves, curves_json

    found = [] if report["interrupted"] else curves(report)  # the suite has seen to it that there is one
    report["curves"] = curves_json(found)
    return found


def _show(report: Report, form: str, found: list[Curve]) -> None:
    """The report on standard output, and its curves."""
    from eeinfer.bench.curve import curve_table
    from eeinfer.bench.tables import csv_text, markdown, markdown_table, print_report, print_table

    match form:
        case "json":
            typer.echo(json.dumps(report, indent=2, allow_nan=False))
        case "csv":
            typer.echo(csv_text(report), nl=False)
        case "md":
            typer.echo(markdown(report) + "".join(f"\n{markdown_table(curve_table(one))}\n" for one in found), nl=False)
        case _:
            from eeinfer.cli.meter import table_console

            console = table_console()
            print_report(report, console)
            for one in found:
                print_table(curve_table(one), console)
