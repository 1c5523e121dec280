"""What a comparison found: a plain dict for JSON, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from peers.comparison import BUSY, Cell, Comparison, agreement, paired
from peers.engines import Engine, LlamaCpp
from rich.console import Console
from rich.table import Table

from eeinfer.bench.metrics import Ratio

SCHEMA, VERSION = "eeinfer-peers", 1

NOTES = (
    "tokens/s counts prompts' time; decode tokens/s only the tokens and the time after the first tokens.",
    "Ratios are eeinfer over the peer, round by round: median (lowest to highest).",
    "Same tokens: share of an answer up to its first difference from the reference's; bf16 ties part them.",
)
OF_ENGINES = {
    LlamaCpp.name: "llama.cpp runs its own benchmark: prompts and tokens are its own, as many, and it does not sample.",
}


def to_report(comparison: Comparison, ours: Sequence[str]) -> dict[str, Any]:
    """The figures as plain values: seconds, and tokens a second.

    Args:
        comparison: what was measured.
        ours: names of the eeinfer engines; the answers of the first are the reference of `same_tokens`.
    """
    cells = comparison.cells
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "engines": [_engine(comparison, engine) for engine in comparison.engines],
        "cells": [_cell(cell, cells.get((ours[0], cell.batch))) for cell in cells.values()],
        "ratios": [
            _ratios(cells[name, cell.batch], cell)
            for cell in cells.values()
            for name in ours
            if cell.engine not in ours and (name, cell.batch) in cells
        ],
    }


def _engine(comparison: Comparison, engine: Engine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "version": engine.version,
        "device": engine.device,
        "start_up_seconds": comparison.start_up.get(engine.name),
        "idle_cores": comparison.idle.get(engine.name),
        "failure": comparison.failures.get(engine.name),
    }


def _cell(cell: Cell, reference: Cell | None) -> dict[str, Any]:
    return {
        "engine": cell.engine,
        "batch": cell.batch,
        "repeats": [
            {
                "round": number,
                "seconds": answer.seconds,
                "decode_seconds": answer.decode_seconds,
                "tokens_per_second": cell.speed(number),
                "decode_tokens_per_second": cell.decode_speed(number),
            }
            for number, answer in sorted(cell.answers.items())
        ],
        "same_tokens": None if reference is None or reference is cell else agreement(cell, reference),
    }


def _ratios(mine: Cell, theirs: Cell) -> dict[str, Any]:
    total, decode = paired(mine, theirs, Cell.speed), paired(mine, theirs, Cell.decode_speed)
    return {
        "batch": mine.batch,
        "eeinfer": mine.engine,
        "peer": theirs.engine,
        "total": asdict(total) if total else None,
        "decode": asdict(decode) if decode else None,
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Speeds, ratios, notes, and the engines that are missing."""
    console.print(_speeds(report))
    if report["ratios"]:
        console.print(_ratio_table(report["ratios"]))
    for engine in report["engines"]:
        if (seconds := engine["start_up_seconds"]) is not None:
            line = f"{engine['name']}: {engine['version']} on {engine['device']}, loaded in {seconds:.0f} s"
            console.print(line, highlight=False, markup=False)
    own = [OF_ENGINES[engine["name"]] for engine in report["engines"] if engine["name"] in OF_ENGINES]
    for line in (*NOTES, *own, *_warnings(report)):
        console.print(line, highlight=False, markup=False)


def _speeds(report: dict[str, Any]) -> Table:
    table = Table("batch", "engine", "tokens/s", "decode tokens/s", "ms a step", "same tokens", title="Speed")
    last = None
    for cell in sorted(report["cells"], key=lambda cell: cell["batch"]):
        if cell["batch"] != last:
            table.add_section()
        last = cell["batch"]
        decode = [repeat["decode_tokens_per_second"] for repeat in cell["repeats"]]
        known = [speed for speed in decode if speed is not None]
        same = cell["same_tokens"]
        table.add_row(
            str(cell["batch"]),
            cell["engine"],
            _spread([repeat["tokens_per_second"] for repeat in cell["repeats"]]),
            _spread(known),
            f"{1000 * cell['batch'] / median(known):.1f}" if known else "–",
            "–" if same is None else f"{same:.0%}",
        )
    return table


def _ratio_table(ratios: Sequence[dict[str, Any]]) -> Table:
    table = Table("batch", "eeinfer", "over", "tokens/s", "decode tokens/s", title="eeinfer over its peers")
    for row in sorted(ratios, key=lambda row: row["batch"]):
        table.add_row(str(row["batch"]), row["eeinfer"], row["peer"], _ratio(row["total"]), _ratio(row["decode"]))
    return table


def _warnings(report: dict[str, Any]) -> list[str]:
    engines = report["engines"]
    lines = [f"left out: {name}; give {option}" for name, option in report["left_out"].items()]
    lines += [f"FAILED: {engine['name']}: {engine['failure']}" for engine in engines if engine["failure"]]
    lines += [
        f"{engine['name']} took up to {engine['idle_cores']:.0%} of a core while others had their turns"
        for engine in engines
        if (engine["idle_cores"] or 0) > BUSY
    ]
    if report["workload"]["repeats"] == 1:
        lines.append("One repeat tells nothing about the spread.")
    if report["interrupted"]:
        lines.append("INTERRUPTED: these are partial results.")
    return lines


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle = f"{median(values):.0f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.0f} to {max(values):.0f})"


def _ratio(values: dict[str, Any] | None) -> str:
    if values is None:
        return "–"
    found = Ratio(**values)
    if found.pairs == 1:
        return f"{found.median:.2f}"
    noise = " in the noise" if found.in_noise else ""
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}){noise}"
