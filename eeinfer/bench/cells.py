"""What is compared: cells with their settings and exits, planned before the weights are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eeinfer.bench.options import Options
from eeinfer.bench.quality import Quality
from eeinfer.bench.readiness import check_trace
from eeinfer.bench.record import CellKey, Run
from eeinfer.bench.sweep import Group
from eeinfer.config.schema import Settings
from eeinfer.engine.build import Located, Note, PlannedExit, plan_exits
from eeinfer.errors import ConfigError
from eeinfer.runner.model_runner import ModelRunner

_CERTAIN = 0.5  # what stands in for a threshold where readiness is decided elsewhere: ready rows have confidence 1

Resolve = Callable[[Mapping[str, Any]], Settings]
Depths = Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Cell:
    """One strategy with its exits and thresholds at work on a group's requests, and what was measured of it."""

    key: CellKey
    settings: Settings
    planned: list[PlannedExit]
    runner: ModelRunner | None = None
    warmup_seconds: float = 0.0
    runs: list[Run] = field(default_factory=list)
    breakdown: dict[str, float] | None = None
    quality: Quality | None = None
    roofline: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Strategy and thresholds, for people."""
        return " ".join([self.key.strategy, *(f"{threshold:g}" for threshold in self.key.threshold)])


def plan_groups(
    options: Options, depths: Depths | None, located: Located, resolve: Resolve, note: Note
) -> dict[Group, list[Cell]]:
    """The cells of every group, `full` first, none twice.

    Args:
        options: of the benchmark.
        depths: of a recorded trace, if one is replayed.
        located: the model.
        resolve: the settings with those of a cell, by dotted key, on top.
        note: called with one-line notices for the user.

    Raises:
        ConfigError: exits that do not fit the model or the trace, or a curve without several thresholds.
    """
    sweep = options.sweep
    if depths is not None:  # which has the lengths
        sweep = replace(sweep, output_lens=(max(map(len, depths.values())),))
    groups: dict[Group, list[Cell]] = {}
    for group in sweep.groups():
        cells = (_cell(options, depths, group, resolve(flags), located, note) for flags in sweep.cells(group))
        groups[group] = list({cell.key: cell for cell in cells}.values())
    if options.curve:
        _check_curve([cell.key for cells in groups.values() for cell in cells])
    return groups


def _cell(
    options: Options, depths: Depths | None, group: Group, settings: Settings, located: Located, note: Note
) -> Cell:
    if options.decided and settings.batching.strategy != "full":
        layers = settings.exits.layers if options.simulated is None else tuple(options.simulated)
        settings = replace(settings, exits=replace(settings.exits, layers=layers, threshold=_CERTAIN))
    planned = plan_exits(settings, located, note)
    exits = tuple(exit_.spec.layers_executed for exit_ in planned)
    if depths is not None and settings.batching.strategy != "full":
        check_trace(depths, exits, located.config.num_layers)
    key = CellKey(
        strategy=settings.batching.strategy,
        batch=group.batch,
        input_len=group.input_len,
        output_len=group.output_len,
        exits=exits,
        threshold=() if options.decided else tuple(exit_.threshold for exit_ in planned),
    )
    return Cell(key, settings, planned)


def _check_curve(keys: Sequence[CellKey]) -> None:
    """A curve needs several thresholds that can be reached, of the same exits."""
    points = Counter((key.strategy, key.batch, key.input_len, key.output_len, key.exits) for key in keys if key.exits)
    if max(points.values(), default=0) < 2:  # noqa: PLR2004 - a curve of one point is none
        raise ConfigError(
            "--curve: no strategy with exits has several thresholds that can be reached; give --threshold more than "
            "once, or leave it out for a grid, and a --strategy other than full"
        )
