"""The quality curve as a picture: speed-up against loss, with the spread of each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eeinfer.bench.curve import Curve, CurvePoint, curves
from eeinfer.bench.metrics import Ratio
from eeinfer.errors import EeinferError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_PANEL = (6.4, 4.6)  # inches
_COLUMNS = 2
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart by colour-blind readers too
_MUTED = "#666666"


def check_plot(path: Path) -> None:
    """See that `plot_curve` could write `path`, before the long work.

    Raises:
        EeinferError: the suffix is neither PNG nor SVG, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise EeinferError(f"{path}: a plot is written as {' or '.join(SUFFIXES)}; give the file one of these suffixes")
    if find_spec("matplotlib") is None:
        raise EeinferError(f'{path}: plots need the package matplotlib; pip install -e ".[bench]" in a checkout')


def plot_curve(report: Mapping[str, Any], path: Path) -> None:
    """Draw the curves of a report, one panel for each kind of work.

    Args:
        report: as `eeinfer.bench.report.read_report` gives it.
        path: PNG or SVG by its suffix; replaced if there is one.

    Raises:
        EeinferError: as `check_plot`; the report holds no curve, or none of its points has both speed-up and loss; the
            file cannot be written.
    """
    check_plot(path)
    drawn = [curve for curve in curves(report) if _placed(curve.points)]
    if not drawn:
        raise EeinferError(
            f"{path}: no point has both a speed-up and a loss; let a round finish, and judge the answers"
        )
    panels = [list(members) for _, members in groupby(drawn, key=lambda curve: curve.work)]
    _draw(panels, report["model"]["name"], path)


def _draw(panels: Sequence[Sequence[Curve]], title: str, path: Path) -> None:
    # Not pyplot: a Figure of its own needs no display and leaves the caller's figures alone.
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    figure.suptitle(f"{title}: speed-up against loss")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, members in zip(axes, panels, strict=False):
        _draw_panel(panel, members)
    for unused in axes[len(panels) :]:
        unused.remove()
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise EeinferError(f"{path}: cannot write the plot ({error.strerror}); name another file") from None


def _draw_panel(axes: Axes, several: Sequence[Curve]) -> None:
    axes.set_title(several[0].work, fontsize="medium", color=_MUTED)
    axes.set_xlabel("loss, % of tokens")
    axes.set_ylabel("speed-up over full")
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(1, color=_MUTED, linewidth=1)
    floor = several[0].full.loss
    if floor is not None:
        axes.axvline(100 * floor, color=_MUTED, linewidth=1, linestyle="--", label=f"loss of full, {floor:.2%}")
    for i, curve in enumerate(several):
        _draw_curve(axes, curve, _COLOURS[i % len(_COLOURS)])
    if not all(point.pareto for curve in several for point, *_ in _placed(curve.points)):
        axes.plot([], [], "o", markerfacecolor="white", markeredgecolor=_MUTED, label="not on the Pareto front")
    axes.margins(x=0.12, y=0.12)
    axes.legend(frameon=False, fontsize="small")


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    points = _placed(curve.points)
    places = [(100 * loss, ratio.median) for _, ratio, loss in points]
    x, y = zip(*places, strict=True)
    spread = [[r.median - r.low for _, r, _ in points], [r.high - r.median for _, r, _ in points]]
    axes.errorbar(x, y, yerr=spread, fmt="none", ecolor=colour, elinewidth=1, capsize=2.5, alpha=0.45)
    axes.plot(x, y, color=colour, linewidth=1.4, label=curve.name)
    for (point, *_), place in zip(points, places, strict=True):
        face = colour if point.pareto else "white"
        axes.plot(*place, marker="o", markersize=5.5, markerfacecolor=face, markeredgecolor=colour)
        # Curves rise to the right, so there is room on the left above.
        label = axes.annotate(point.label, place, (-6, 4), textcoords="offset points", ha="right", fontsize="small")
        label.set(color=colour, bbox={"boxstyle": "square,pad=0.05", "fc": "white", "ec": "none", "alpha": 0.7})


def _placed(points: Sequence[CurvePoint]) -> list[tuple[CurvePoint, Ratio, float]]:
    """The points that have both, with speed-up and loss."""
    return [(p, p.speed_up, p.loss) for p in points if p.speed_up is not None and p.loss is not None]
