"""Batching strategies side by side: speed, depth and exits on the same prompts, interleaved in one process.

Ratios are against `full` at the same batch, pair by pair within a repeat; medians, with the smallest and the largest
beside them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eeinfer import LLM, Request, RequestOutput
from eeinfer.engine.prompt_file import PACKAGED_PROMPTS, read_prompt_file


@dataclass
class Cell:
    """One strategy at one batch size: an engine, and what each repeat measured."""

    llm: LLM
    speeds: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    def run(self, requests: list[Request]) -> None:
        """Answer all requests and note the speed."""
        tokens, seconds = self.llm.stats.generated_tokens, self.llm.stats.seconds
        self.outputs = self.llm.generate(requests)
        self.speeds.append((self.llm.stats.generated_tokens - tokens) / (self.llm.stats.seconds - seconds))


def main(
    prompts: Annotated[Path, typer.Option(help="JSON Lines of prompts.")] = PACKAGED_PROMPTS,
    num_prompts: Annotated[int, typer.Option(min=1, help="Only the first N prompts.")] = 32,
    strategy: Annotated[str, typer.Option(help="Strategies to compare; full is always run.")] = "full,all-exit,split",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens a prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each cell, after one that does not count.")] = 3,
    threshold: Annotated[str | None, typer.Option(help="Instead of the packaged thresholds.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
) -> None:
    """Compare batching strategies on the default model."""
    requests = [line for line in read_prompt_file(prompts, limit=num_prompts) if isinstance(line, Request)]
    names = ["full", *(name for name in strategy.split(",") if name != "full")]
    chosen = {} if threshold is None else {"threshold": tuple(float(x) for x in threshold.split(","))}
    rows, progress, console = [], Console(stderr=True), Console()
    for size in map(int, batch.split(",")):
        cells = {name: Cell(LLM(strategy=name, max_num_seqs=size, max_tokens=max_tokens, **chosen)) for name in names}
        warm_up = requests[: max(1, min(size, 4))]
        for cell in cells.values():
            cell.llm.generate(warm_up)
        for _ in track(
            range(repeats), f"batch {size}", console=progress, transient=True, disable=not progress.is_terminal
        ):
            for cell in cells.values():
                cell.run(requests)
        rows += [_figures(size, name, cell, cells["full"]) for name, cell in cells.items()]
    (console if console.is_terminal else Console(width=120)).print(_table(rows))
    if output:
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _figures(size: int, name: str, cell: Cell, full: Cell) -> dict[str, object]:
    tokens = [token for out in cell.outputs for token in out.tokens]
    depths = sorted({token.layers_executed for token in tokens})
    same = sum(a.text == b.text for a, b in zip(cell.outputs, full.outputs, strict=True))
    return {
        "batch": size,
        "strategy": name,
        "tokens_per_second": cell.speeds,
        "ratio": [mine / theirs for mine, theirs in zip(cell.speeds, full.speeds, strict=True)],
        "mean_layers": sum(token.layers_executed for token in tokens) / len(tokens),
        "share": {depth: sum(token.layers_executed == depth for token in tokens) / len(tokens) for depth in depths},
        "same_answers": same / len(cell.outputs),
        "involuntary_exits": cell.llm.stats.involuntary_exits,
        "involuntary_stays": cell.llm.stats.involuntary_stays,
    }


def _table(rows: list[dict]) -> Table:
    table = Table("batch", "strategy", "tokens/s", "over full", "mean layers", "share per exit", "same answers")
    for row in rows:
        shares = "  ".join(f"{depth}: {share:.0%}" for depth, share in row["share"].items())
        table.add_row(
            str(row["batch"]),
            row["strategy"],
            _spread(row["tokens_per_second"], ".0f"),
            _spread(row["ratio"], ".2f"),
            f"{row['mean_layers']:.1f}",
            shares,
            f"{row['same_answers']:.0%}",
        )
    return table


def _spread(values: list[float], form: str) -> str:
    middle = f"{median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    typer.run(main)
