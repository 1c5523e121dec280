"""What the tables of a report say: each column is one figure, in words, and why it may be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from eeinfer.bench.metrics import SECTIONS, Percentiles, Ratio, Spread, Summary, full_of, summarise

_FILE_PROMPTS = "as given"
_P = "(p50 / p95 / p99)"
_NO_DECODE = "no answer has a second token"
_NO_QUALITY = "the answers were not judged"
_NO_EFFICIENCY = "no layer was skipped, or there is no breakdown of full"
_NO_MEMORY = "this system does not tell"
_NO_BREAKDOWN = "not measured for this cell"
_NO_FLOOR = "nothing was decoded, so there is no floor"


@dataclass(frozen=True, slots=True)
class Row:
    """A cell of a report with its summary."""

    cell: Mapping[str, Any]
    summary: Summary

    @property
    def is_full(self) -> bool:
        """Whether it is the baseline."""
        return bool(self.cell["key"]["strategy"] == "full")

    def figure(self, part: str, name: str) -> Any:
        """One figure of `quality`, `breakdown` or `roofline`; None when that was not measured."""
        return (self.cell[part] or {}).get(name)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure.

    Attributes:
        header: with its unit.
        text: of a row; None when there is none.
        why: a figure may be missing. Empty: a column that no row fills is left out instead.
    """

    header: str
    text: Callable[[Row], str | None]
    why: str = ""


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """The cells of a report, summarised."""
    cells, num_layers = report["cells"], report["model"]["num_layers"]
    return [Row(cell, summarise(cell, full_of(cells, cell["key"]), num_layers)) for cell in cells]


# Keys


def key_texts(key: Mapping[str, Any]) -> dict[str, str]:
    """What identifies a cell, by name, in words. `full` has no exits."""
    return {
        "batch": str(key["batch"]),
        "input": _FILE_PROMPTS if key["input_len"] is None else str(key["input_len"]),
        "output": str(key["output_len"]),
        "strategy": key["strategy"],
        "exits": ", ".join(map(str, key["exits"])) or ("" if key["strategy"] == "full" else "none can be reached"),
        "threshold": _thresholds(key["threshold"]),
    }


def key_name(key: Mapping[str, Any]) -> str:
    """What identifies a cell, in one phrase."""
    texts = key_texts(key)
    return f"{texts.pop('strategy')} ({', '.join(f'{name} {text}' for name, text in texts.items() if text)})"


def _thresholds(values: Sequence[float | str]) -> str:
    """One number where all are equal; infinite ones are text in a file."""
    texts = [f"{float(value):g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def split_names(keys: Iterable[Mapping[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Names of `key_texts` that tell cells apart, with `strategy`; and the others with the text that all share."""
    texts = [key_texts(key) for key in keys]
    several, shared = [], {}
    for name in ("batch", "input", "output", "strategy", "exits", "threshold"):
        known = {text[name] for text in texts if text[name]}
        if name == "strategy" or len(known) > 1:
            several.append(name)
        elif known:
            shared[name] = known.pop()
    return several, shared


# Figures in words


def ratio_text(ratio: Ratio | None) -> str | None:
    """Such as `1.02 (0.95 to 1.08) in the noise`."""
    if ratio is None:
        return None
    if ratio.pairs == 1:
        return f"{ratio.median:.2f} (1 repeat)"
    return f"{_range(ratio, 2)}{' in the noise' if ratio.in_noise else ''}"


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _speed(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        spread = getattr(row.summary, name)
        if spread is None:
            return None
        return _range(spread, 1) if row.summary.repeats > 1 else f"{spread.median:.1f}"

    return text


def _speed_up(name: str) -> Callable[[Row], str | None]:
    return lambda row: "baseline" if row.is_full else ratio_text(getattr(row.summary, name))


def _efficiency(row: Row) -> str | None:
    if row.is_full:
        return ""
    found = row.summary.exit_efficiency
    return None if found is None else _range(found, 2) if found.pairs > 1 else f"{found.median:.2f}"


def _count(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        count = getattr(row.summary, name)
        return None if count is None else str(count)

    return text


def _milliseconds(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        found: Percentiles | None = getattr(row.summary, name)
        return None if found is None else " / ".join(f"{at * 1e3:.1f}" for at in astuple(found))

    return text


def _requests(row: Row) -> str | None:
    return None if row.summary.requests_per_second is None else f"{row.summary.requests_per_second.median:.2f}"


def _mean_layers(row: Row) -> str | None:
    return None if row.summary.mean_layers is None else f"{row.summary.mean_layers:.2f}"


def _shares(row: Row) -> str | None:
    return " ".join(f"{depth}:{share:.1%}" for depth, share in row.summary.exit_shares.items()) or None


def _quality(name: str, form: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = row.figure("quality", name)
        return None if value is None else format(value, form)

    return text


def _preemptions(row: Row) -> str | None:
    return str(row.summary.preemptions) if row.summary.preemptions else None


def _memory(row: Row) -> str | None:
    return None if row.summary.peak_memory is None else f"{row.summary.peak_memory / 2**30:.2f}"


def _section(name: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        seconds = row.figure("breakdown", name)
        if seconds is None:
            return None
        whole = sum(row.cell["breakdown"].values())
        return f"{seconds * 1e3:.2f} {seconds / whole if whole else 0:.0%}"

    return text


def _step(row: Row) -> str | None:
    return f"{sum(row.cell['breakdown'].values()) * 1e3:.2f}" if row.cell["breakdown"] else None


def _floor(name: str, scale: float = 1.0) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = row.figure("roofline", name)
        return None if value is None else f"{value * scale:.2f}" if isinstance(value, float | int) else str(value)

    return text


TABLES: tuple[tuple[str, tuple[Column, ...]], ...] = (
    (
        "Speed",
        (
            Column("tokens/s", _speed("tokens_per_second")),
            Column("speed-up over full", _speed_up("speed_up"), "full has no speed"),
            Column("exit efficiency", _efficiency, _NO_EFFICIENCY),
            Column("requests/s", _requests),
        ),
    ),
    (
        "Speed of decoding (without prompts)",
        (
            Column("decode tokens/s", _speed("decode_tokens_per_second"), _NO_DECODE),
            Column("speed-up over full", _speed_up("decode_speed_up"), _NO_DECODE),
            Column(f"TPOT ms {_P}", _milliseconds("tpot"), _NO_DECODE),
        ),
    ),
    (
        "Exits",
        (
            Column("mean layers", _mean_layers, _NO_DECODE),
            Column("tokens per exit", _shares, _NO_DECODE),
            Column("involuntary exits", _count("involuntary_exits")),
            Column("involuntary stays", _count("involuntary_stays")),
        ),
    ),
    (
        "Agreement with full",
        (
            Column("loss", _quality("loss", ".2%"), _NO_QUALITY),
            Column("strict loss", _quality("strict_loss", ".2%"), _NO_QUALITY),
            Column("identical", _quality("identical", ".1%"), _NO_QUALITY),
            Column("ROUGE-L", _quality("rouge_l", ".3f")),
            Column("exact match", _quality("exact_match", ".1%")),
        ),
    ),
    (
        "Latency and memory",
        (
            Column(f"TTFT ms {_P}", _milliseconds("ttft"), "no answer has a token"),
            Column("KV blocks at peak", _count("peak_blocks")),
            Column("peak memory GiB", _memory, _NO_MEMORY),
            Column("preempted", _preemptions),
        ),
    ),
    (
        "Where a decode step went (ms of one iteration, all running sequences together)",
        (
            *(Column(name, _section(name)) for name in SECTIONS),
            Column("together", _step, _NO_BREAKDOWN),
        ),
    ),
    (
        "Roofline (ms of one iteration)",
        (
            Column("measured", _floor("measured_seconds_per_iteration", 1e3)),
            Column("floor", _floor("floor_seconds_per_iteration", 1e3)),
            Column("measured / floor", _floor("ratio")),
            Column("bound by", _floor("bound"), _NO_FLOOR),
        ),
    ),
)
