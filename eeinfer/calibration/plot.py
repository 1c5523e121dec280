"""A calibration as a picture: risk and mean depth along the path, with the tolerance and what certifies it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eeinfer.calibration.result import Outcome, Result
from eeinfer.errors import EeinferError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL = (6.4, 3.6)  # inches
_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # proposed, pilot, tested: told apart by colour-blind readers too
_MUTED = "#666666"


def plot_result(result: Result, path: Path) -> None:
    """Draw one column for each exit set: loss above, layers below, both against the steps of the path.

    Args:
        result: of a calibration.
        path: PNG or SVG by its suffix; replaced if there is one.

    Raises:
        EeinferError: the file cannot be written.
    """
    # Not pyplot: a Figure of its own needs no display and leaves the caller's figures alone.
    from matplotlib.figure import Figure

    columns = len(result.outcomes)
    figure = Figure(figsize=(_PANEL[0] * columns, 2 * _PANEL[1]), layout="constrained")
    base = result.judge.located.base
    figure.suptitle(f"{base.name}: loss and depth along the path")
    axes = figure.subplots(2, columns, squeeze=False, sharex="col")
    for column, outcome in enumerate(result.outcomes):
        _draw_loss(axes[0][column], result, outcome)
        _draw_layers(axes[1][column], outcome, base.num_layers)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise EeinferError(f"{path}: cannot write the plot ({error.strerror}); name another file") from None


def _draw_loss(axes: Axes, result: Result, outcome: Outcome) -> None:
    _frame(axes, "mean loss of a prompt, %")
    axes.set_title(f"exits after {', '.join(map(str, outcome.exits))} layers", fontsize="medium", color=_MUTED)
    expected = [100 * point.expected_loss for point in outcome.path]
    axes.plot(expected, color=_COLOURS[0], linewidth=1, label="proposed by traces")
    axes.plot(*_points({step: 100 * sample.loss for step, sample in outcome.pilot.items()}), "s", color=_COLOURS[1])
    tested = {one.step: 100 * one.sample.loss for one in outcome.tested}
    axes.plot(*_points(tested), "o", color=_COLOURS[2])
    lines = [100 * result.full.loss]
    axes.axhline(lines[0], color=_MUTED, linewidth=1, linestyle=":", label=f"full depth, {result.full.loss:.2%}")
    if result.aim.budget is None and result.limit is not None:
        lines += [100 * result.aim.tolerance, 100 * result.limit]
        axes.axhline(lines[1], color="black", linewidth=1, label=f"tolerance, {result.aim.tolerance:.2%}")
        axes.axhline(lines[2], color="black", linewidth=1, linestyle="--", label=f"certifies, {result.limit:.2%}")
    # The eager end of a path loses many times the tolerance, and would press all else to the ground.
    axes.set_ylim(0, 1.5 * max(*lines, *tested.values()) or None if tested else None)
    axes.legend(frameon=False, fontsize="small")


def _draw_layers(axes: Axes, outcome: Outcome, num_layers: int) -> None:
    _frame(axes, f"layers of {num_layers} per decode token")
    axes.set_xlabel("step of the path, safest first")
    expected = [point.expected_layers for point in outcome.path]
    axes.plot(expected, color=_COLOURS[0], linewidth=1, label="proposed by traces")
    pilot = {step: sample.mean_layers for step, sample in outcome.pilot.items()}
    axes.plot(*_points(pilot), "s", color=_COLOURS[1], label="free-running, other prompts")
    tested = {one.step: one.sample.mean_layers for one in outcome.tested}
    axes.plot(*_points(tested), "o", color=_COLOURS[2], label="free-running, certifying prompts")
    if outcome.chosen is not None:
        axes.axvline(outcome.chosen.step, color=_MUTED, linewidth=1, linestyle="--", label="chosen")
    axes.set_ylim(top=num_layers)
    axes.legend(frameon=False, fontsize="small")


def _frame(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]
