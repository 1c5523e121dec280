"""`eeinfer tune-heads`: exit heads for a model that has none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eeinfer.cli.options import Resolver, note, takes_settings

if TYPE_CHECKING:
    from eeinfer.training.least_squares import ExitResult


@takes_settings(
    "model.name", "model.dtype", "model.device", "batching.max_num_seqs", "sampling.max_tokens", "sampling.seed"
)
def tune_heads(
    resolve: Resolver,
    exits: Annotated[str, typer.Option(metavar="N,N,…", help="Where the heads go, as counts of layers run.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the heads are written.")],
    method: Annotated[Literal["least-squares"], typer.Option(help="How they are fitted.")] = "least-squares",
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", show_default="about 300 packaged prompts", help="JSON Lines, as for generate."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
) -> None:
    """Fit exit heads to the model's own answers to a file of prompts. The model itself is not changed.

    Use them with generate --heads FOLDER.
    """
    from eeinfer.config.validate import validated_text
    from eeinfer.engine.prompt_file import PACKAGED_PROMPTS
    from eeinfer.errors import ConfigError

    assert method == "least-squares"
    layers = validated_text("exits.layers", exits, "--exits")
    if not isinstance(layers, tuple):
        raise ConfigError(f"--exits {exits}: name the exits, such as 18,21,24,27")
    resolve()  # bad settings are told before torch is loaded
    from eeinfer.training.least_squares import tune

    source = sys.stdin.buffer if prompts == "-" else PACKAGED_PROMPTS if prompts is None else Path(prompts)
    results = tune(resolve, prompts=source, exits=layers, output=output, num_prompts=num_prompts, note=note)
    _print(results)


def _print(results: list[ExitResult]) -> None:
    """A table of the exits on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "exit", "agreement, bare head", "fitted", "threshold", "tokens leaving", caption="on held-out prompts"
    )
    for result in results:
        shares = (result.bare_agreement, result.agreement)
        cells = (f"{share:.1%}" for share in shares)
        table.add_row(str(result.layers_executed), *cells, f"{result.threshold:.4f}", f"{result.leaving:.1%}")
    Console().print(table)
