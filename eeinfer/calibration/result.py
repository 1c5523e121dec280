"""What came of a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eeinfer.calibration.aim import Aim
from eeinfer.calibration.bounds import largest_mean, prompts_needed
from eeinfer.calibration.judge import Judge, Sample
from eeinfer.calibration.path import Point

Layers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tested:
    """A step of a path, judged on the certifying prompts. `p_value` is None where only a budget was asked for."""

    step: int
    exits: Layers
    thresholds: tuple[float, ...]
    sample: Sample
    p_value: float | None
    passed: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one exit set.

    Attributes:
        exits: the set.
        path: fixed by the path's prompts.
        start: the step where testing began.
        pilot: free-running figures of the path's prompts, by step.
        tested: in order.
        chosen: the last that passed.
    """

    exits: Layers
    path: Sequence[Point]
    start: int
    pilot: Mapping[int, Sample]
    tested: Sequence[Tested]
    chosen: Tested | None


@dataclass(frozen=True, slots=True)
class Result:
    """A calibration.

    Attributes:
        aim: what was asked for.
        judge: what answered, with the settings of the run.
        outcomes: of each exit set.
        full: the unmodified model's answers to the certifying prompts: its loss is rounding alone.
        n: certifying prompts; `data` is their fingerprint.
        chosen: the certified step of least depth, or the one within the budget of least loss.
    """

    aim: Aim
    judge: Judge
    outcomes: Sequence[Outcome]
    full: Sample
    n: int
    data: str
    chosen: Tested | None

    @property
    def delta(self) -> float:
        """Level of the tests on each exit set."""
        return self.aim.delta(len(self.outcomes))

    @property
    def limit(self) -> float | None:
        """The largest mean loss that certifies."""
        return largest_mean(self.n, self.aim.tolerance, self.delta)

    @property
    def certified(self) -> bool:
        """Whether the chosen step carries a guarantee."""
        return self.chosen is not None and self.aim.budget is None

    @property
    def reason(self) -> str:
        """Why there is no guarantee; empty when there is one."""
        if self.certified:
            return ""
        if self.aim.budget is not None and self.chosen is not None:
            return f"chosen for a budget of {self.aim.budget:g} layers, without a guarantee"
        if self.aim.budget is not None:
            return f"no thresholds meet a budget of {self.aim.budget:g} layers{self._reach()}"
        return f"nothing certifies at tolerance {self.aim.tolerance:g}. {self._remedy()}"

    def _reach(self) -> str:
        layers = [sample.mean_layers for outcome in self.outcomes for sample in outcome.pilot.values()]
        return f"; the most eager run {min(layers):.1f}" if layers else ""

    def _remedy(self) -> str:
        firsts = [outcome.tested[0] for outcome in self.outcomes if outcome.tested]
        if not firsts:
            return "No threshold keeps apart tokens that agree and tokens that do not: the exit heads are too weak"
        best = min(firsts, key=lambda tested: tested.sample.loss)
        needed = prompts_needed(self.aim.tolerance, self.delta, best.sample.loss)
        where = f"the first step tested has a mean loss of {best.sample.loss:.4f} on {self.n} prompts"
        if needed is None:
            return (
                f"{where}, above the tolerance: no number of prompts would do; raise --tolerance, or tune better heads"
            )
        return f"{where}, with which about {needed} prompts would be needed"
