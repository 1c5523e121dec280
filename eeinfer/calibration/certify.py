"""Certified thresholds (Learn then Test): traces propose a path, free-running answers to other prompts certify it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from eeinfer.calibration.aim import Aim
from eeinfer.calibration.bounds import largest_mean, prompts_needed, smallest_tolerance
from eeinfer.calibration.judge import PROBE, Judge, Progress, Sample
from eeinfer.calibration.loss import TIE
from eeinfer.calibration.path import Point, build_path
from eeinfer.calibration.prompts import (
    PATH_SHARE,
    Note,
    Prompt,
    data_fingerprint,
    encoded,
    read_prompts,
    split,
    tuned_ids,
    without_tuned,
)
from eeinfer.calibration.result import Layers, Outcome, Result, Tested
from eeinfer.calibration.sequence import fixed_sequence, starting_step, within_budget
from eeinfer.calibration.traces import Traces, trace
from eeinfer.config.load import Loaded
from eeinfer.config.schema import Settings
from eeinfer.engine.build import Located, load_model, locate, plan_exits
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.exits.files import load_heads

PILOT = 100  # path prompts that choose the starting step


def certify(
    resolve: Callable[[Path | None], Loaded],
    *,
    prompts: Path | BinaryIO,
    work: Path,
    aim: Aim | None = None,
    path_prompts: float | Path | BinaryIO = PATH_SHARE,
    exit_sets: Sequence[Layers] = (),
    num_prompts: int | None = None,
    tie: float = TIE,
    force: bool = False,
    note: Note = lambda _: None,
    progress: Progress = lambda _: None,
) -> Result:
    """Find the most eager thresholds of a path whose loss is certified, or those within a budget of layers.

    Args:
        resolve: loads the settings (see `eeinfer.engine.llm.LLM.from_loaded`). Measure, decay, completion, number type
            and max_tokens are part of what is certified; thresholds are chosen, and decoding is greedy.
        prompts: JSON Lines; those that certify are exchangeable with the prompts to come, or nothing is guaranteed.
        work: folder where judged answers are remembered, so that a run goes on where another stopped.
        aim: the default is a tolerance of 0.02 at 95 % confidence.
        path_prompts: the share of `prompts` that fixes the path, or other prompts for it.
        exit_sets: exits (layers executed) to choose among, which share the confidence; the default is one set, that of
            the settings.
        num_prompts: only the first so many lines of `prompts`.
        tie: gap in probability up to which a token does not count as different.
        force: certify although the heads were tuned on certifying prompts.
        note: called with one-line notices for the user.
        progress: called with what is being done.

    Raises:
        ConfigError: settings or options that cannot be used, or too few prompts.
        EeinferError: prompts, model or heads cannot be used.
    """
    aim = aim or Aim()
    requests = read_prompts(prompts, note, limit=num_prompts)
    other = path_prompts if isinstance(path_prompts, float) else read_prompts(path_prompts, note)
    found = split(requests, other, note)
    located = locate(resolve(None).settings.model, note)
    settings = resolve(located.packaged_settings).settings
    sets = _exit_sets(exit_sets, settings, located, note)
    tuned = tuned_ids(located.heads, note) if located.heads else set()
    found = without_tuned(found, tuned, note, force=force)
    _check_enough(len(found.certify), aim, len(sets))
    model = load_model(settings.model, located, note)
    config = located.config
    path, certifying = (
        encoded(part, model.tokenizer, config.vocab_size, config.max_position, note)
        for part in (found.path, found.certify)
    )
    _check_enough(len(certifying), aim, len(sets))
    note(f"{len(path)} prompts fix the path, {len(certifying)} others certify; judged answers are kept in {work}")
    return _Run(aim, Judge(settings, located, model, work, tie, progress), path, certifying, sets).result()


def _exit_sets(asked: Sequence[Layers], settings: Settings, located: Located, note: Note) -> list[Layers]:
    """The exit sets, checked as far as that goes without the weights."""
    tuned = [spec.layers_executed for spec in load_heads(located.heads, located.base).specs] if located.heads else []
    own = settings.exits.layers
    sets = list(dict.fromkeys(asked)) or [tuple(tuned) if own == "auto" else own]
    for exits in sets:
        if not exits:
            raise ConfigError(
                "no exits are named and the model has no exit heads: pass --exits N,N,… or --heads FOLDER"
            )
        if tuned and (unknown := sorted(set(exits) - set(tuned))):
            raise ConfigError(
                f"exits.layers: {located.heads} has no head after {', '.join(map(str, unknown))} layers; it has "
                f"{', '.join(map(str, tuned))}: name some of these, or pass --heads none for the model's own head"
            )
        exit_settings = replace(settings.exits, layers=exits, threshold=(PROBE,) * len(exits))
        split_settings = replace(settings.batching, strategy="split")
        plan_exits(replace(settings, exits=exit_settings, batching=split_settings), located, note)
    return sets


def _check_enough(n: int, aim: Aim, sets: int) -> None:
    delta = aim.delta(sets)
    if aim.budget is not None and n > 0:
        return
    if n == 0 or largest_mean(n, aim.tolerance, delta) is None:
        least = "" if n == 0 else f", or raise --tolerance to {smallest_tolerance(n, delta) + 5e-5:.4f}"
        raise ConfigError(
            f"{n} certifying prompts are too few: tolerance {aim.tolerance:g} at confidence {aim.confidence:g} takes "
            f"{prompts_needed(aim.tolerance, delta)}, even without any loss; give more prompts{least}"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """The judge with both kinds of prompts."""

    aim: Aim
    judge: Judge
    path_prompts: Sequence[Prompt]
    certify_prompts: Sequence[Prompt]
    sets: Sequence[Layers]

    def result(self) -> Result:
        """Fix the paths, then test them."""
        self.judge.progress("answers at full depth")
        full = self.judge.full(self.certify_prompts)
        if not full.depths:
            raise EeinferError(
                "every answer ends with its first token, which comes from the prompt, so nothing could leave early; "
                "give other prompts, or raise --max-tokens"
            )
        traces = self._traces()
        decay = self.judge.settings.exits.decay
        find = self._tested if self.aim.budget is None else self._within
        outcomes = [find(exits, build_path(traces.of(exits), decay)) for exits in self.sets]
        chosen = [outcome.chosen for outcome in outcomes if outcome.chosen is not None]
        if self.aim.budget is None:
            best = min(chosen, key=lambda tested: tested.sample.mean_layers, default=None)
        else:
            best = min(chosen, key=lambda tested: tested.sample.loss, default=None)
        n, data = len(self.certify_prompts), data_fingerprint(self.certify_prompts)
        return Result(self.aim, self.judge, outcomes, full, n, data, best)

    def _traces(self) -> Traces:
        answers = self.judge.full(self.path_prompts).judged
        pairs = [(prompt.tokens, one.answer) for prompt, one in zip(self.path_prompts, answers, strict=True)]
        layers = tuple(sorted({n for exits in self.sets for n in exits}))
        self.judge.progress(f"tracing {len(layers)} exits on {len(pairs)} answers")
        max_tokens = self.judge.settings.sampling.max_tokens
        return trace(self.judge.model.decoder, self.judge.exits(layers), pairs, max_tokens, self.judge.tie)

    def _tested(self, exits: Layers, path: list[Point]) -> Outcome:
        """Fixed-sequence testing from a start that the pilot chooses."""
        pilot, samples = (_Samples(self.judge, exits, path, part) for part in self._parts())
        if not path:
            return Outcome(exits, path, 0, {}, (), None)
        delta = self.aim.delta(len(self.sets))
        limit = largest_mean(len(self.certify_prompts), self.aim.tolerance, delta)
        assert limit is not None, "too few prompts are refused before"
        start = starting_step([point.expected_loss for point in path], lambda step: pilot.at(step).losses, limit)
        verdicts = fixed_sequence(
            lambda step: samples.at(step).losses,
            range(start, len(path)),
            tolerance=self.aim.tolerance,
            delta=delta,
        )
        tested = [
            Tested(v.step, exits, path[v.step].thresholds, samples.at(v.step), v.p_value, v.passed) for v in verdicts
        ]
        chosen = next((one for one in reversed(tested) if one.passed), None)
        return Outcome(exits, path, start, pilot.known, tested, chosen)

    def _within(self, exits: Layers, path: list[Point]) -> Outcome:
        """The safest step within the budget on the pilot."""
        pilot, samples = (_Samples(self.judge, exits, path, part) for part in self._parts())
        budget = self.aim.budget
        assert budget is not None, "only where a budget is asked for"
        step = within_budget(len(path), lambda step: pilot.at(step).mean_layers, budget) if path else None
        if step is None:
            return Outcome(exits, path, 0, pilot.known, (), None)
        chosen = Tested(step, exits, path[step].thresholds, samples.at(step), None, passed=True)
        return Outcome(exits, path, step, pilot.known, [chosen], chosen)

    def _parts(self) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        return self.path_prompts[:PILOT], self.certify_prompts


class _Samples:
    """Free-running figures of some prompts at the steps of a path, each judged once."""

    def __init__(self, judge: Judge, exits: Layers, path: Sequence[Point], prompts: Sequence[Prompt]) -> None:
        self.known: dict[int, Sample] = {}
        self._judge, self._exits, self._path, self._prompts = judge, exits, path, prompts

    def at(self, step: int) -> Sample:
        """The figures at a step."""
        if step not in self.known:
            self.known[step] = self._judge.at(self._exits, self._path[step].thresholds, self._prompts)
        return self.known[step]
