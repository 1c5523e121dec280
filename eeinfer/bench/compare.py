"""Two reports side by side: what differs between them, then the ratios of the cells that both have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rich.console import Console
from rich.text import Text

from eeinfer.bench.columns import key_name, key_texts, ratio_text, split_names
from eeinfer.bench.metrics import Ratio, percentiles, ratio
from eeinfer.bench.tables import MISSING, Table, print_table
from eeinfer.errors import EeinferError


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell that both reports have.

    Attributes:
        key: of the cell, as in a report.
        tokens_per_second, decode_tokens_per_second: B over A, higher is faster.
        tpot: median time per output token of a run, B over A, lower is faster.
        loss: of B less that of A, as shares; None when one was not judged.
    """

    key: Mapping[str, Any]
    tokens_per_second: Ratio | None
    decode_tokens_per_second: Ratio | None
    tpot: Ratio | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in both reports, by dotted name. An absent entry is None."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports, A and B.

    Attributes:
        differences: in environment, commit, model, workload and settings.
        rows: cells that both have, in the order of A.
        only_a, only_b: keys of cells that the other lacks.
        interrupted: names, of `A` and `B`, of reports that are not whole.
    """

    differences: tuple[Difference, ...]
    rows: tuple[Compared, ...]
    only_a: tuple[Mapping[str, Any], ...]
    only_b: tuple[Mapping[str, Any], ...]
    interrupted: tuple[str, ...]


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two reports.

    Runs of two reports are no pairs: a ratio is over all pairs of a run of A and a run of B.

    Raises:
        EeinferError: no cell is in both.
    """
    mine, theirs = ({_identity(cell["key"]): cell for cell in report["cells"]} for report in (a, b))
    rows = tuple(_compared(mine[key], theirs[key]) for key in mine if key in theirs)
    if not rows:
        raise EeinferError(
            f"the two results have no cell in common: A has {_all_names(a)}; B has {_all_names(b)}; measure the same "
            "strategies, batches, lengths, exits and thresholds"
        )
    return Comparison(
        differences=tuple(_differences(a, b)),
        rows=rows,
        only_a=tuple(mine[key]["key"] for key in mine if key not in theirs),
        only_b=tuple(theirs[key]["key"] for key in theirs if key not in mine),
        interrupted=tuple(name for name, report in (("A", a), ("B", b)) if report["interrupted"]),
    )


def _identity(key: Mapping[str, Any]) -> tuple[Any, ...]:
    exits, threshold = tuple(key["exits"]), tuple(float(value) for value in key["threshold"])
    return key["strategy"], key["batch"], key["input_len"], key["output_len"], exits, threshold


def _compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> Compared:
    ours, theirs = ((cell["quality"] or {}).get("loss") for cell in (a, b))
    return Compared(
        key=a["key"],
        tokens_per_second=_unpaired(*(_figures(cell, "tokens_per_second") for cell in (a, b))),
        decode_tokens_per_second=_unpaired(*(_figures(cell, "decode_tokens_per_second") for cell in (a, b))),
        tpot=_unpaired(*(_median_tpot(cell) for cell in (a, b))),
        loss=None if ours is None or theirs is None else theirs - ours,
    )


def _figures(cell: Mapping[str, Any], name: str) -> list[float]:
    return [repeat[name] for repeat in cell["repeats"] if repeat[name]]


def _median_tpot(cell: Mapping[str, Any]) -> list[float]:
    found = (percentiles(repeat["tpot"]) for repeat in cell["repeats"])
    return [each.p50 for each in found if each and each.p50]


def _unpaired(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    return ratio([theirs / ours for ours, theirs in product(a, b)])


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in ("eeinfer_version", "commit"):
        if a[name] != b[name]:
            yield Difference(name, a[name], b[name])
    for part in ("environment", "model", "workload", "settings"):
        for name in sorted(a[part].keys() | b[part].keys()):
            ours, theirs = a[part].get(name), b[part].get(name)
            if ours != theirs:
                yield Difference(f"{part}.{name}", ours, theirs)


def print_comparison(a: Mapping[str, Any], b: Mapping[str, Any], console: Console) -> None:
    """Print what differs between two reports, then the ratios.

    Raises:
        EeinferError: no cell is in both.
    """
    comparison = compare(a, b)
    for name, report in (("A", a), ("B", b)):
        console.print(Text(f"{name}: {report['model']['name']}, measured {report['created']}"))
    if comparison.differences:
        rows = tuple((d.name, _said(d.a), _said(d.b)) for d in comparison.differences)
        print_table(Table("They differ in", ("", "A", "B"), rows, 3), console)
    for name in comparison.interrupted:
        console.print(Text(f"{name} was interrupted: some of its rounds are missing."))
    print_table(_ratios(comparison.rows), console)
    for name, keys in (("A", comparison.only_a), ("B", comparison.only_b)):
        for key in keys:
            console.print(Text(f"Only in {name}: {key_name(key)}"))


def _ratios(rows: Sequence[Compared]) -> Table:
    labels, _ = split_names(row.key for row in rows)
    lines = [
        (
            *(key_texts(row.key)[label] for label in labels),
            *(ratio_text(r) or MISSING for r in (row.tokens_per_second, row.decode_tokens_per_second, row.tpot)),
            MISSING if row.loss is None else f"{row.loss * 100:+.2f}",
        )
        for row in rows
    ]
    notes = ["Median (lowest to highest) over all pairs of a run of A and one of B; in the noise: on both sides of 1."]
    if any(MISSING in line for line in lines):
        notes.append(
            f"{MISSING}: one of the two has no such figure (no complete round, no second token, or not judged)."
        )
    headers = ("tokens/s B/A", "decode tokens/s B/A", "TPOT B/A (lower is faster)", "loss B - A, points")
    return Table("B over A", (*labels, *headers), tuple(lines), len(labels), tuple(notes))


def _all_names(report: Mapping[str, Any]) -> str:
    return "; ".join(key_name(cell["key"]) for cell in report["cells"]) or "none"


def _said(value: Any) -> str:
    return "none" if value is None else str(value)
