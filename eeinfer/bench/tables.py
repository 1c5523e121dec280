"""A report for people: tables on a terminal or in markdown, and raw numbers as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from eeinfer.bench.columns import TABLES, Column, Row, key_texts, rows_of, split_names
from eeinfer.bench.metrics import SECTIONS, Percentiles, Ratio, Spread
from eeinfer.bench.notes import heading, notes
from eeinfer.bench.quality import Quality

MISSING = "–"

_ROOFLINE = ("floor_seconds_per_iteration", "measured_seconds_per_iteration", "ratio", "bound")
_PARTS = {
    "tokens_per_second": Spread,
    "decode_tokens_per_second": Spread,
    "requests_per_second": Spread,
    "speed_up": Ratio,
    "decode_speed_up": Ratio,
    "exit_efficiency": Ratio,
    "ttft": Percentiles,
    "tpot": Percentiles,
}


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows under headers.

    Attributes:
        title: above it.
        headers: of all columns.
        rows: as long as `headers`.
        labels: how many columns on the left name the row.
        notes: below it.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int
    notes: tuple[str, ...] = ()


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print all tables with what stands above and below them."""
    rows = rows_of(report)
    for line in heading(report):
        console.print(Text(line))
    for table in tables(rows):
        print_table(table, console)
    for note in notes(report, rows):
        console.print(Text(note, "dim"))


def print_table(table: Table, console: Console) -> None:
    """Print one table. Where room is short, cells break between words."""
    shown = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(table.headers):
        shown.add_column(header, justify="left" if i < table.labels else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    if table.notes:
        console.print(Text("\n".join((*table.notes, "")), "dim"))


def markdown(report: Mapping[str, Any]) -> str:
    """The report as GitHub markdown."""
    rows = rows_of(report)
    above = "  \n".join(heading(report))
    below = "\n".join(f"- {note}" for note in notes(report, rows))
    return "\n\n".join([above, *map(markdown_table, tables(rows)), below]) + "\n"


def csv_text(report: Mapping[str, Any]) -> str:
    """One line a cell, raw numbers: seconds, bytes, shares. Empty where there is no figure."""
    lines = [_csv_line(row) for row in rows_of(report)]
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0] if lines else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def tables(rows: Sequence[Row]) -> list[Table]:
    """Speed, exits, agreement, latency and memory, where a decode step went, roofline: those that were measured."""
    labels, _ = split_names(row.cell["key"] for row in rows)
    found = [_table(title, columns, rows, labels) for title, columns in TABLES]
    return [table for table in found if table]


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row], labels: Sequence[str]) -> Table | None:
    """None when no row has a figure in any column that would be left out for that."""
    texts = {column: [column.text(row) for row in rows] for column in columns}
    shown = [column for column in columns if column.why or any(text is not None for text in texts[column])]
    if all(text is None for column in columns for text in texts[column]):
        return None
    names = [[key_texts(row.cell["key"])[label] for label in labels] for row in rows]
    lines = [
        (*name, *(MISSING if texts[column][i] is None else str(texts[column][i]) for column in shown))
        for i, name in enumerate(names)
    ]
    return Table(
        title=title,
        headers=(*labels, *(column.header for column in shown)),
        rows=tuple(lines),
        labels=len(labels),
        notes=tuple(_missing(shown, texts, rows)),
    )


def _missing(shown: Sequence[Column], texts: Mapping[Column, Sequence[str | None]], rows: Sequence[Row]) -> list[str]:
    """Why figures are missing, each reason once; cells without a complete round have a note of their own."""
    headers: dict[str, list[str]] = {}
    for column in shown:
        if column.why and any(
            text is None and row.summary.repeats for text, row in zip(texts[column], rows, strict=True)
        ):
            headers.setdefault(column.why, []).append(column.header)
    return [f"{MISSING} under {', '.join(names)}: {why}." for why, names in headers.items()]


def markdown_table(table: Table) -> str:
    """One table as GitHub markdown."""
    rule = ["---"] * table.labels + ["---:"] * (len(table.headers) - table.labels)
    escaped = [[text.replace("|", "\\|") for text in row] for row in (table.headers, *table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
    return "\n\n".join([f"**{table.title}**", "\n".join(lines), *table.notes])


def _csv_line(row: Row) -> dict[str, Any]:
    key = {name: _listed(value) for name, value in row.cell["key"].items()}
    summary = asdict(row.summary)
    plain = {name: value for name, value in summary.items() if name not in _PARTS}
    plain["exit_shares"] = " ".join(f"{depth}:{share}" for depth, share in row.summary.exit_shares.items())
    parts = {
        f"{name}_{part.name}": (summary[name] or {}).get(part.name)
        for name, kind in _PARTS.items()
        for part in fields(kind)
    }
    return {
        **key,
        **plain,
        **parts,
        **{part.name: row.figure("quality", part.name) for part in fields(Quality)},
        **{f"breakdown_{name}": row.figure("breakdown", name) for name in SECTIONS},
        **{f"roofline_{name}": row.figure("roofline", name) for name in _ROOFLINE},
        "warmup_seconds": row.cell["warmup_seconds"],
    }


def _listed(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list) else value
