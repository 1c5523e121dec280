"""Strategies on one model, in turns.

Each has an engine that stays, so that prompts come from its prefix cache after a first round: decoding is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from gpu.answers import located
from gpu.place import Place
from gpu.report import DoesNotFitError
from torch import Tensor

from eeinfer.bench.measure import measure
from eeinfer.bench.readiness import SimulatedExits
from eeinfer.bench.record import Run
from eeinfer.bench.sweep import Group
from eeinfer.bench.workload import limited, synthetic
from eeinfer.config.schema import Settings
from eeinfer.core.plan import Outcome, Plan, Row
from eeinfer.core.request import Request
from eeinfer.engine.build import Model, build_engine, build_runner, plan_exits
from eeinfer.engine.engine import Engine
from eeinfer.model.families import ModelConfig
from eeinfer.runner.memory import bytes_per_block
from eeinfer.runner.model_runner import ModelRunner

SEED = 0
MARGIN = 3 * 2**30  # bytes for logits, graphs and prefills


@dataclass(frozen=True, slots=True)
class Work:
    """What all engines of a race do: `batch` requests of `context` prompt tokens, `new` tokens each."""

    batch: int
    context: int
    new: int
    block_size: int = 16

    def __str__(self) -> str:
        blocks = f", blocks of {self.block_size}" if self.block_size != 16 else ""  # noqa: PLR2004 - the default
        return f"batch {self.batch}, context {self.context}{blocks}"

    @property
    def num_blocks(self) -> int:
        """KV blocks: admission keeps one free a sequence, and the last one of a cached prompt is copied."""
        return self.batch * (-(-(self.context + self.new) // self.block_size) + 3)

    def requests(self, config: ModelConfig) -> list[Request]:
        """Random prompts."""
        group = Group(self.batch, self.context, self.new)
        return limited(synthetic(group, self.batch, config.vocab_size, SEED), self.new, ignore_eos=True)


@dataclass(slots=True)
class Rates:
    """Simulated exits whose rates change between runs; see `SimulatedExits`."""

    now: SimulatedExits

    def ready(self, row: Row, layers_executed: int) -> bool:
        """Whether `row` is ready at the exit after `layers_executed` layers."""
        return self.now.ready(row, layers_executed)


@dataclass(slots=True)
class Racer:
    """One engine of a race, and what was measured of it.

    Attributes:
        label: of its figures.
        engine: with its own cache.
        requests: that it answers in each run.
        built: seconds that it took to build, graphs included.
        notes: what was told meanwhile.
        rates: of simulated exits; None where nobody leaves.
        runs: that count.
        shares: of each counted run's time, that outside of the runner.
    """

    label: str
    engine: Engine
    requests: Sequence[Request]
    built: float = 0.0
    notes: Sequence[str] = ()
    rates: Rates | None = None
    exit_rates: Mapping[int, float] | None = None
    runs: list[Run] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def run(self) -> Run:
        """One run over all requests."""
        if self.rates is not None and self.exit_rates is not None:
            self.rates.now = SimulatedExits(self.exit_rates, SEED)
        return measure(self.engine, self.requests)

    def count(self) -> None:
        """One run that counts."""
        watch = Watch(self.engine.runner.run)
        self.engine.runner.run = watch  # type: ignore[method-assign]
        try:
            run = self.run()
        finally:
            self.engine.runner.run = watch.inner  # type: ignore[method-assign]
        decode = sum(step.seconds for step in run.steps if step.kind != "prefill")
        self.runs.append(run)
        self.shares.append(1 - watch.seconds / decode if decode else 0.0)


@dataclass(slots=True)
class Watch:
    """A runner's `run` that adds up its time, prefills left out."""

    inner: Callable[[Plan], Outcome]
    seconds: float = 0.0

    def __call__(self, plan: Plan) -> Outcome:
        """Carry out the plan."""
        started = perf_counter()
        outcome = self.inner(plan)
        if type(plan).__name__ != "Prefill":
            self.seconds += perf_counter() - started
        return outcome


def check_fits(place: Place, model: Model, work: Work, caches: int) -> None:
    """Refuse work whose caches this device has no room for, with the figures.

    Raises:
        DoesNotFitError: they do not fit.
    """
    decoder = model.decoder
    size = bytes_per_block(decoder.config, decoder.dtype, work.block_size)
    needed, free = caches * (work.num_blocks + 2) * size + MARGIN * (not place.dry), place.free()
    if needed > free:
        raise DoesNotFitError(
            f"{caches} caches of {work.num_blocks} blocks of {size / 2**20:.1f} MiB and {MARGIN / 2**30:.0f} GiB for "
            f"the rest are {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        )


def racer(
    place: Place,
    model: Model,
    work: Work,
    label: str,
    settings: Mapping[str, Any],
    *,
    cache: Tensor | None = None,
    runner_class: type[ModelRunner] = ModelRunner,
) -> Racer:
    """An engine for this work, with a cache of its own unless one is given."""
    notes: list[str] = []
    resolved = _settings(place, model, work, settings)
    planned = plan_exits(resolved, located(model.decoder.config, label), lambda _: None)
    rates = Rates(SimulatedExits({}, SEED)) if planned else None
    started = perf_counter()
    runner = build_runner(
        resolved,
        model,
        planned,
        readiness=rates,
        capture=place.capture(resolved),
        cache=cache,
        runner_class=runner_class,
        note=notes.append,
    )
    place.synchronise()
    built = perf_counter() - started
    engine = build_engine(resolved, model, runner)
    return Racer(label, engine, work.requests(model.decoder.config), built=built, notes=notes, rates=rates)


def _settings(place: Place, model: Model, work: Work, own: Mapping[str, Any]) -> Settings:
    return place.settings(
        **{
            "batching__max_num_seqs": work.batch,
            "batching__max_num_batched_tokens": 8192,
            "cache__num_blocks": work.num_blocks,
            "cache__block_size": work.block_size,
            "model__dtype": str(model.decoder.dtype).removeprefix("torch."),
            **own,
        }
    )


def race(racers: Sequence[Racer], repeats: int) -> None:
    """Warm all up, then let them take turns; each round begins with another."""
    for one in racers:
        one.run()
    for repeat in range(repeats):
        first = repeat % len(racers)
        for one in (*racers[first:], *racers[:first]):
            one.count()
