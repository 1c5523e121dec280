"""The quality curve: speed-up against loss over thresholds, from the cells of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eeinfer.bench.columns import ratio_text
from eeinfer.bench.metrics import Ratio, full_of, summarise
from eeinfer.bench.tables import MISSING, Table
from eeinfer.errors import EeinferError

# Dense near 1: with the packaged heads the loss is about full's own at 0.9999 and some 8 % at 0.95.
CURVE_THRESHOLDS = (0.9999, 0.999, 0.995, 0.99, 0.95, 0.9, 0.8, 0.6)

_HEADERS = ("threshold", "speed-up", "layers", "loss", "strict", "identical", "ROUGE-L", "exact", "Pareto")
_PARETO = (
    "Pareto: no other point, nor full, is at least as good in both speed-up and loss, and better in one. It goes by "
    "medians: points within each other's spread may trade places."
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One threshold of a curve.

    Attributes:
        threshold: one an exit; none for `full`.
        speed_up: tokens/s over those of `full`; `None` for `full` and for a cell without a complete repeat.
        mean_layers: executed for a decode token.
        loss, strict_loss, identical, rouge_l, exact_match: see `eeinfer.bench.quality.Quality`.
        pareto: no other point, nor `full`, is at least as good in both speed-up and loss, and better in one.
    """

    threshold: tuple[float, ...]
    speed_up: Ratio | None
    mean_layers: float | None
    loss: float | None
    strict_loss: float | None
    identical: float | None
    rouge_l: float | None
    exact_match: float | None
    pareto: bool = False

    @property
    def label(self) -> str:
        """The threshold in short: one number where all exits have the same."""
        if not self.threshold:
            return "full"
        same = len(set(self.threshold)) == 1
        return ",".join(f"{threshold:g}" for threshold in (self.threshold[:1] if same else self.threshold))


@dataclass(frozen=True, slots=True)
class Curve:
    """The thresholds of one strategy on the same work.

    Attributes:
        strategy, batch, input_len, output_len, exits: as in `eeinfer.bench.record.CellKey`.
        full: figures of `full` on this work; its loss is the numerical floor.
        points: highest threshold first.
    """

    strategy: str
    batch: int
    input_len: int | None
    output_len: int
    exits: tuple[int, ...]
    full: CurvePoint
    points: tuple[CurvePoint, ...]

    @property
    def work(self) -> str:
        """What its strategy was measured on."""
        prompts = "prompts as they are" if self.input_len is None else f"prompts of {self.input_len} tokens"
        return f"batch {self.batch}, {prompts}, {self.output_len} new tokens"

    @property
    def name(self) -> str:
        """Its strategy and exits."""
        return f"{self.strategy} at {', '.join(map(str, self.exits))}"


def curves(report: Mapping[str, Any]) -> list[Curve]:
    """The curves in a report: one for each strategy and set of exits that has several thresholds on the same work.

    Args:
        report: as `eeinfer.bench.report.read_report` gives it.

    Raises:
        EeinferError: there is none.
    """
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        key = cell["key"]
        if key["strategy"] != "full":
            shared = key["strategy"], key["batch"], key["input_len"], key["output_len"], tuple(key["exits"])
            cells.setdefault(shared, []).append(cell)
    found = [_curve(shared, members, report) for shared, members in cells.items() if len(members) > 1]
    found = [replace(curve, points=_marked(curve, found)) for curve in found]
    if not found:
        raise EeinferError(
            "there is no curve: no strategy was measured at several thresholds; run with --curve, or give --threshold "
            "more than once"
        )
    return found


def _curve(shared: tuple[Any, ...], cells: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> Curve:
    base, num_layers = full_of(report["cells"], cells[0]["key"]), report["model"]["num_layers"]
    full = _point(base, base, num_layers)
    points = sorted((_point(cell, base, num_layers) for cell in cells), key=lambda p: p.threshold, reverse=True)
    strategy, batch, input_len, output_len, exits = shared
    return Curve(strategy, batch, input_len, output_len, exits, full, tuple(points))


def _point(cell: Mapping[str, Any], full: Mapping[str, Any], num_layers: int) -> CurvePoint:
    summary, quality = summarise(cell, full, num_layers), cell["quality"] or {}
    return CurvePoint(
        threshold=tuple(float(number) for number in cell["key"]["threshold"]),  # "inf" is text in a report
        speed_up=summary.speed_up,
        mean_layers=summary.mean_layers,
        loss=quality.get("loss"),
        strict_loss=quality.get("strict_loss"),
        identical=quality.get("identical"),
        rouge_l=quality.get("rouge_l"),
        exact_match=quality.get("exact_match"),
    )


def _marked(curve: Curve, several: Sequence[Curve]) -> tuple[CurvePoint, ...]:
    """The points of a curve, with those marked that are on the Pareto front of all curves of the same work."""
    rivals = [place for other in several if other.work == curve.work for place in map(_place, other.points) if place]
    if curve.full.loss is not None:
        rivals.append((1.0, -curve.full.loss))

    def on_front(place: tuple[float, float] | None) -> bool:
        return place is not None and not any(
            rival != place and rival[0] >= place[0] and rival[1] >= place[1] for rival in rivals
        )

    return tuple(replace(point, pareto=on_front(_place(point))) for point in curve.points)


def _place(point: CurvePoint) -> tuple[float, float] | None:
    """Speed-up and loss, both the larger the better; None where either is missing."""
    return None if point.speed_up is None or point.loss is None else (point.speed_up.median, -point.loss)


def curves_json(several: Sequence[Curve]) -> list[dict[str, Any]]:
    """The curves as JSON takes them; an infinite threshold is text, as in a report."""
    return [
        asdict(curve) | {"full": _point_json(curve.full), "points": [_point_json(point) for point in curve.points]}
        for curve in several
    ]


def _point_json(point: CurvePoint) -> dict[str, Any]:
    numbers = [number if math.isfinite(number) else str(number) for number in point.threshold]
    return asdict(point) | {"threshold": numbers}


def curve_table(curve: Curve) -> Table:
    """A curve in rows, `full` above its points; columns that no row fills are left out."""
    columns = zip(_HEADERS, *(_row(point) for point in (curve.full, *curve.points)), strict=True)
    headers, *rows = zip(*(column for column in columns if set(column[1:]) != {MISSING}), strict=True)
    return Table(f"{curve.name}: {curve.work}", headers, tuple(rows), 1, (_PARETO,))


def _row(point: CurvePoint) -> tuple[str, ...]:
    texts = (
        point.label,
        ratio_text(point.speed_up) if point.threshold else "baseline",
        _number(point.mean_layers, ".2f"),
        *(_number(share, ".2%") for share in (point.loss, point.strict_loss, point.identical)),
        _number(point.rouge_l, ".3f"),
        _number(point.exact_match, ".2%"),
        "yes" if point.pareto else "",
    )
    return tuple(MISSING if text is None else text for text in texts)


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
