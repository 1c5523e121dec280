"""`eeinfer tune-heads`: exit heads for a model that has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eeinfer.cli.options import Resolver, note, takes_settings
from eeinfer.cli.prompt_source import prompt_source
from eeinfer.training.options import Kind, Options

if TYPE_CHECKING:
    from rich.table import Table

    from eeinfer.training.judge import Judged
    from eeinfer.training.least_squares import ExitResult
    from eeinfer.training.tune import Tuned

_DEFAULT = Options()


def _distill(help_text: str, default: object = None, **rules: Any) -> Any:
    """An option of one method alone. Its value is None unless given, so that the other method can refuse it."""
    shown = False if default is None else str(default)
    return typer.Option(help=help_text, show_default=shown, rich_help_panel="For --method distill", **rules)


Exits = Annotated[
    str,
    typer.Option(
        metavar="N,N,…", help="Where the heads go, as counts of layers run; auto, with --method distill: where it pays."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the heads are written.")]
Method = Annotated[Literal["least-squares", "distill"], typer.Option(help="In closed form, or trained, with gates.")]
Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", show_default="about 300 packaged prompts", help="JSON Lines, as for generate."),
]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")]
OfKind = Annotated[Kind | None, _distill("Form of the heads.", _DEFAULT.kind)]
Width = Annotated[int | None, _distill("Width of the MLP.", "the model's hidden size", min=1)]
Rank = Annotated[int | None, _distill("Rank of the linear map.", "a full matrix", min=1)]
GateWidth = Annotated[int | None, _distill("Width of the gates; 0: no gates.", _DEFAULT.gate_width, min=0)]
GateTokens = Annotated[int | None, _distill("Tokens on a gate's shortlist.", _DEFAULT.gate_tokens, min=1)]
CompletionRank = Annotated[
    int | None, _distill("Rank of learned completion; 0: none.", _DEFAULT.completion_rank, min=0)
]
Epochs = Annotated[float | None, _distill("Passes over the answers.", _DEFAULT.epochs, min=0)]
Rate = Annotated[float | None, _distill("Highest learning rate.", _DEFAULT.lr, min=0)]
BatchTokens = Annotated[int | None, _distill("Tokens of one step.", _DEFAULT.batch_tokens, min=1)]
Candidates = Annotated[
    int | None, _distill("Likely tokens that most steps look at; 0: all.", _DEFAULT.candidates, min=0)
]
FullVocabularyShare = Annotated[
    float | None,
    _distill("Share of steps, the last, that look at all tokens.", _DEFAULT.full_vocabulary_share, min=0, max=1),
]
Work = Annotated[
    Path | None,
    _distill("For answers, states and checkpoints.", "training in the model store", metavar="FOLDER"),
]
Judge = Annotated[Path | None, _distill("Prompts on which the heads are only judged.", metavar="FILE")]
Resume = Annotated[bool | None, _distill("Go on where the same run was killed.", "resume")]


@takes_settings(
    "model.name",
    "model.dtype",
    "model.device",
    "model.kernels",
    "model.enforce_eager",
    "batching.max_num_seqs",
    "sampling.max_tokens",
    "sampling.temperature",
    "sampling.seed",
)
def tune_heads(
    resolve: Resolver,
    exits: Exits,
    output: Output,
    method: Method = "least-squares",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    kind: OfKind = None,
    width: Width = None,
    rank: Rank = None,
    gate_width: GateWidth = None,
    gate_tokens: GateTokens = None,
    completion_rank: CompletionRank = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_tokens: BatchTokens = None,
    candidates: Candidates = None,
    full_vocabulary_share: FullVocabularyShare = None,
    work: Work = None,
    judge: Judge = None,
    resume: Resume = None,
) -> None:
    """Fit exit heads to the model's own answers to a file of prompts. The model itself is not changed.

    Use them with generate --heads FOLDER. On several devices: accelerate launch -m eeinfer tune-heads …
    """
    from eeinfer.engine.prompt_file import PACKAGED_PROMPTS

    recipe = _given(
        {
            "kind": kind,
            "width": width,
            "rank": rank,
            "gate_width": gate_width,
            "gate_tokens": gate_tokens,
            "completion_rank": completion_rank,
            "epochs": epochs,
            "lr": lr,
            "batch_tokens": batch_tokens,
            "candidates": candidates,
            "full_vocabulary_share": full_vocabulary_share,
        }.items()
    )
    further = _given([("work", work), ("judge", judge), ("resume", resume)])
    common: dict[str, Any] = {
        "prompts": PACKAGED_PROMPTS if prompts is None else prompt_source(prompts),
        "exits": _layers(exits, method),
        "output": output,
        "num_prompts": num_prompts,
        "note": note,
    }
    if method == "least-squares":
        _refuse([*recipe, *further])
    resolve()  # bad settings are told before torch is loaded
    if method == "least-squares":
        _fit(resolve, common)
    else:
        _tune(resolve, common, recipe, further)


def _fit(resolve: Resolver, common: dict[str, Any]) -> None:
    from eeinfer.training.least_squares import tune as fit

    _print_fitted(fit(resolve, **common))


def _tune(resolve: Resolver, common: dict[str, Any], recipe: dict[str, Any], further: dict[str, Any]) -> None:
    from eeinfer.training.tune import tune

    tuned = tune(resolve, **common, options=Options(**recipe), **further)
    if tuned is not None:  # in the other processes of a launch
        _print_tuned(tuned)


def _given(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options if value is not None}


def _layers(exits: str, method: str) -> tuple[int, ...] | None:
    from eeinfer.config.validate import validated_text
    from eeinfer.errors import ConfigError

    layers = validated_text("exits.layers", exits, "--exits")
    if isinstance(layers, tuple):
        return layers
    if method == "least-squares":
        raise ConfigError(f"--exits {exits} is for --method distill; name the exits, such as 18,21,24,27")
    return None


def _refuse(names: Sequence[str]) -> None:
    from eeinfer.errors import ConfigError

    if names:
        flag = f"--{names[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is for --method distill; add that, or leave {flag} out")


def _print_fitted(results: Sequence[ExitResult]) -> None:
    """A table of the exits on standard output."""
    from rich.table import Table

    from eeinfer.cli.meter import table_console

    table = Table(
        "exit", "agreement, bare head", "fitted", "threshold", "tokens leaving", caption="on held-out prompts"
    )
    for result in results:
        shares = (result.bare_agreement, result.agreement)
        cells = (f"{share:.1%}" for share in shares)
        table.add_row(str(result.layers_executed), *cells, f"{result.threshold:.4f}", f"{result.leaving:.1%}")
    table_console().print(table)


def _print_tuned(tuned: Tuned) -> None:
    """Tables on standard output: each exit, and all exits in turn, on dev and on the further prompts."""
    from eeinfer.cli.meter import table_console

    console = table_console()
    judged = {"dev": tuned.dev} | ({} if tuned.other is None else {"--judge": tuned.other})
    for name, figures in judged.items():
        console.print(_exits_table(name, figures))
    for name, figures in judged.items():
        console.print(_joint_table(name, figures))


def _exits_table(name: str, judged: Judged) -> Table:
    from rich.table import Table

    measures = list(judged.joint)
    columns = [f"{measure}: {what}" for measure in measures for what in ("AUROC", "95 / 98 / 99 % right")]
    title = f"{name}, {judged.tokens} tokens: agreement with the full model, and tokens that may leave"
    table = Table("exit", "agreement", *columns, title=title)
    for exit_ in judged.exits:
        row = [str(exit_.layers_executed), f"{exit_.agreement:.1%}"]
        for measure in measures:
            figures = exit_.measures[measure]
            row.append("-" if figures.auroc is None else f"{figures.auroc:.3f}")
            row.append(" / ".join(f"{100 * share:.1f}" for share in figures.coverage))
        table.add_row(*row)
    return table


def _joint_table(name: str, judged: Judged) -> Table:
    from rich.table import Table

    columns = ("thresholds", "leaving %", "right", "layers skipped", "layers saved, charged", "ideal speed-up")
    table = Table("measure", *columns, title=f"{name}: all exits in turn, per token")
    for measure, turn in judged.joint.items():
        table.add_row(
            measure,
            " ".join(f"{threshold:.5g}" for threshold in turn.thresholds),
            " ".join(f"{100 * share:.1f}" for share in turn.leaving),
            "-" if turn.precision is None else f"{turn.precision:.2%}",
            f"{turn.skipped:.2f}",
            f"{turn.saved:.2f}",
            f"{turn.speedup:.3f}",
        )
    return table
