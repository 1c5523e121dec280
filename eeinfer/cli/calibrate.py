"""`eeinfer calibrate-thresholds`: thresholds with a guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from eeinfer.cli.options import Resolver, note, takes_settings
from eeinfer.cli.prompt_source import prompt_source

if TYPE_CHECKING:
    from eeinfer.calibration.result import Aim, Result


Exits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N,N,…",
        show_default="those of the heads",
        help="Exits as counts of layers run; repeat to choose among sets, which share the confidence.",
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", show_default="about 300 packaged prompts", help="JSON Lines, as for generate."),
]
PathPrompts = Annotated[
    str,
    typer.Option(
        metavar="SHARE|FILE", help="What fixes the path before any test: a share of the prompts, or prompts of its own."
    ),
]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")]
Tolerance = Annotated[
    float | None,
    typer.Option(show_default="0.02", help="Largest mean share of tokens that differ from the full model's."),
]
Confidence = Annotated[
    float | None, typer.Option(show_default="0.95", help="Chance, over the choice of prompts, that it holds.")
]
Budget = Annotated[
    float | None,
    typer.Option(metavar="MEAN_LAYERS", help="Instead of a tolerance: the least loss at this depth, no guarantee."),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE.toml", help="The settings, with what they promise.")
]
Work = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", show_default="calibration.work beside the output", help="Where judged answers are kept."
    ),
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Loss and depth along the path, .png or .svg (eeinfer[bench]).")
]
Force = Annotated[bool, typer.Option("--force", help="Even if the heads were tuned on certifying prompts.")]


@takes_settings(
    "model.name",
    "model.heads",
    "model.dtype",
    "model.device",
    "model.kernels",
    "model.enforce_eager",
    "exits.measure",
    "exits.decay",
    "exits.completion",
    "batching.max_num_seqs",
    "cache.num_blocks",
    "cache.block_size",
    "cache.prefix_cache",
    "sampling.max_tokens",
    "sampling.seed",
)
def calibrate_thresholds(
    resolve: Resolver,
    exits: Exits = None,
    prompts: Prompts = None,
    path_prompts: PathPrompts = "0.25",
    num_prompts: NumPrompts = None,
    tolerance: Tolerance = None,
    confidence: Confidence = None,
    budget: Budget = None,
    output: Output = Path("calibration.toml"),
    work: Work = None,
    plot: Plot = None,
    force: Force = False,
) -> None:
    """Find thresholds whose mean loss is within the tolerance, with the given confidence.

    Loss of a prompt: the share of its answer's tokens that the full model would not have chosen there. Some prompts fix
    a path of thresholds, from safe to eager; the others certify steps of it, one after the other, until one fails
    (Learn then Test). The guarantee is for greedy answers of up to --max-tokens to prompts like those that certified.

    An interrupted run goes on where it stopped. Use the file with -c, or as calibration.toml beside the exit heads.
    """
    from eeinfer.bench.report import check_destination

    aim = _aim(tolerance, confidence, budget)
    sets = [_layers(text) for text in exits or ()]
    resolve()  # bad settings are told before torch is loaded
    check_destination(output, "--output")
    if plot is not None:
        from eeinfer.bench.plot import check_plot

        check_destination(plot, "--plot")
        check_plot(plot)
    result = _run(
        resolve,
        aim,
        sets=sets,
        prompts=_prompts(prompts),
        path_prompts=_path_prompts(path_prompts),
        num_prompts=num_prompts,
        work=work or output.parent / "calibration.work",
        force=force,
    )
    _deliver(result, output, plot)


def _aim(tolerance: float | None, confidence: float | None, budget: float | None) -> Aim:
    from eeinfer.calibration.aim import CONFIDENCE, TOLERANCE, Aim
    from eeinfer.errors import ConfigError

    if budget is not None and not (tolerance is None and confidence is None):
        raise ConfigError("--budget has no guarantee, so it goes without --tolerance and --confidence")
    return Aim(
        tolerance=TOLERANCE if tolerance is None else tolerance,
        confidence=CONFIDENCE if confidence is None else confidence,
        budget=budget,
    )


def _layers(text: str) -> tuple[int, ...]:
    from eeinfer.config.validate import validated_text
    from eeinfer.errors import ConfigError

    layers = validated_text("exits.layers", text, "--exits")
    if not isinstance(layers, tuple):
        raise ConfigError(f"--exits {text}: name the exits, such as 18,21,24,27, or leave the option out")
    return layers


def _prompts(text: str | None) -> Path | BinaryIO:
    from eeinfer.engine.prompt_file import PACKAGED_PROMPTS

    if text is None:
        note("no --prompts given: calibrating on the packaged ones")
        return PACKAGED_PROMPTS
    return prompt_source(text)


def _path_prompts(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def _run(
    resolve: Resolver,
    aim: Aim,
    *,
    sets: list[tuple[int, ...]],
    prompts: Path | BinaryIO,
    path_prompts: float | Path,
    num_prompts: int | None,
    work: Path,
    force: bool,
) -> Result:
    from eeinfer.calibration.certify import certify
    from eeinfer.cli.meter import what_runs

    try:
        with what_runs() as progress:
            return certify(
                resolve,
                prompts=prompts,
                work=work,
                aim=aim,
                path_prompts=path_prompts,
                exit_sets=sets,
                num_prompts=num_prompts,
                force=force,
                note=note,
                progress=progress,
            )
    except KeyboardInterrupt:
        note(f"interrupted: run the same command again to go on; judged answers are kept in {work}")
        raise


def _deliver(result: Result, output: Path, plot: Path | None) -> None:
    from eeinfer.calibration.layer import write_layer
    from eeinfer.calibration.report import print_result
    from eeinfer.cli.meter import table_console

    write_layer(result, output)
    if plot is not None:
        from eeinfer.calibration.plot import plot_result

        plot_result(result, plot)
    print_result(result, table_console())
    note(f"written to {output}: use it with -c {output}, or put it beside the exit heads as calibration.toml")
