"""A calibration for people: a table of the steps that were tested."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eeinfer.calibration.layer import headline
from eeinfer.calibration.result import Outcome, Result, Tested


def print_result(result: Result, console: Console) -> None:
    """Print a table for each exit set, what its columns mean, and the result in one line."""
    for outcome in result.outcomes:
        console.print(_table(result, outcome))
    for line in _notes(result):
        console.print(Text(line, "dim"))
    console.print(Text(headline(result), "bold"))


def _table(result: Result, outcome: Outcome) -> Table:
    title = f"exits after {', '.join(map(str, outcome.exits))} layers: steps on {result.n} certifying prompts"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column("thresholds", overflow="fold")
    for header in ("loss", "strict", "p-value", "layers"):
        table.add_column(header, justify="right")
    table.add_column("share of tokens per depth", overflow="fold")
    table.add_column("time", justify="right")
    table.add_column("")
    for tested in outcome.tested:
        table.add_row(*map(Text, _cells(result, tested)))
    return table


def _cells(result: Result, tested: Tested) -> tuple[str, ...]:
    sample = tested.sample
    passed = "passed" if tested.passed else "failed"
    mark = "chosen" if tested is result.chosen else passed
    return (
        str(tested.step),
        ", ".join(f"{threshold:.6g}" for threshold in tested.thresholds),
        f"{sample.loss:.4f}",
        f"{sample.strict_loss:.4f}",
        "–" if tested.p_value is None else f"{tested.p_value:.4f}",
        f"{sample.mean_layers:.2f}",
        ", ".join(f"{depth}: {share:.1%}" for depth, share in sample.shares.items()),
        f"{sample.seconds:.0f} s" if sample.seconds else "known",
        mark,
    )


def _notes(result: Result) -> list[str]:
    full = result.full
    meaning = (
        f"Loss: share of a prompt's tokens whose probability is more than {result.judge.tie:g} below the full model's "
        f"top one, mean over prompts; strict: share that is not its argmax. Full depth itself: {full.loss:.4f}, "
        f"strict {full.strict_loss:.4f}. Layers and shares are of decode tokens."
    )
    notes = [meaning]
    if result.aim.budget is None and result.limit is not None:
        notes.append(
            f"A step passes at p <= {result.delta:.4g} (Hoeffding-Bentkus), which is a mean loss of at most "
            f"{result.limit:.4f} on these prompts. The first that fails ends the sequence."
        )
    notes += [
        f"Exits {', '.join(map(str, outcome.exits))}: a path of {len(outcome.path)} steps; testing began at step "
        f"{outcome.start}, which other prompts chose."
        for outcome in result.outcomes
        if outcome.path and result.aim.budget is None
    ]
    return notes
