"""Where the time of a decode step goes, measured on a run of its own whose speed is not reported.

A decoder and a runner that keep time stand in for the plain ones, so that serving pays nothing for it. Time belongs to
the innermost section; what no section claims is the host's: planning, building step data, detokenising.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from eeinfer.bench.metrics import SECTIONS
from eeinfer.core.plan import Complete, Draw, Outcome, Pass, Row
from eeinfer.core.request import Request, TokenLogprob
from eeinfer.engine.engine import Engine
from eeinfer.exits.check import Checked, Exit
from eeinfer.model.decoder import Decoder
from eeinfer.model.weights import LayerWeights
from eeinfer.ops.native.kernels import Times
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.runner.model_runner import ModelRunner


class SectionTimer:
    """Adds up the time spent in named sections, innermost first.

    Args:
        synchronise: waits for the device, so that its work is counted where it was asked for.
        clock: seconds.
    """

    def __init__(self, synchronise: Callable[[], None], clock: Callable[[], float] = perf_counter) -> None:
        self._synchronise = synchronise
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time inside belongs to `name`, unless an inner section claims it. Completion claims all that it does."""
        if "completion" in self._open:
            yield
            return
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Time that was added to one section belongs to another."""
        if "completion" not in self._open:
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by section since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _switch(self) -> None:
        self._synchronise()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedDecoder(Decoder):
    """A decoder that keeps time, on the weights of another."""

    def __init__(self, decoder: Decoder, timer: SectionTimer) -> None:
        super().__init__(decoder.config, decoder.weights, decoder.native, decoder.parts)
        self.timer = timer
        self._times = Times()
        if self.native is not None:
            self._layer = partial(self.native.layers.layer, times=self._times)

    def run(self, layers: range, hidden: Tensor, batch: TokenBatch, cache: Tensor) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        with self.timer.section("stages"):
            result = super().run(layers, hidden, batch, cache)
        # A native layer is one call, which says itself what attention took.
        self.timer.move("stages", "attention", self._times.attention / 1e9)
        self._times.attention = 0
        return result

    def attend(
        self,
        projected: Tensor,
        w: LayerWeights,
        cache: Tensor,
        batch: TokenBatch,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """See Decoder."""
        with self.timer.section("attention"):
            return super().attend(projected, w, cache, batch, rotation)

    def vocabulary(self, normed: Tensor) -> Tensor:
        """See Decoder."""
        with self.timer.section("vocabulary"):
            return super().vocabulary(normed)


class TimedRunner(ModelRunner):
    """A runner that keeps time; its decoder is a TimedDecoder."""

    @property
    def _timer(self) -> SectionTimer:
        assert isinstance(self.decoder, TimedDecoder)
        return self.decoder.timer

    def _leave(self, plan: Pass, hidden: Tensor, before: Tensor) -> Outcome:
        with self._timer.section("checks"):
            return super()._leave(plan, hidden, before)

    def _exit_tokens(
        self, exit_: Exit, checked: Checked, hidden: Tensor, rows: Sequence[Row], leaving: list[int]
    ) -> tuple[list[int], dict[int, tuple[TokenLogprob, ...]]]:
        with self._timer.section("sampling"):
            return super()._exit_tokens(exit_, checked, hidden, rows, leaving)

    def _pick(self, hidden: Tensor, draws: Sequence[Draw]) -> Outcome:
        with self._timer.section("sampling"):
            return super()._pick(hidden, draws)

    def _complete(self, plan: Complete) -> None:
        with self._timer.section("completion"):
            super()._complete(plan)


def timer_for(device: torch.device) -> SectionTimer:
    """A timer that waits for `device` where that is needed."""
    return SectionTimer(torch.cuda.synchronize if device.type == "cuda" else lambda: None)


def breakdown(engine: Engine, timer: SectionTimer, requests: Sequence[Request]) -> dict[str, float] | None:
    """Seconds a decode iteration (one token of every running sequence) in each of SECTIONS; prefill is left out.

    None when nothing was decoded.

    Args:
        engine: with a TimedRunner.
        timer: that of its decoder.
        requests: answered by the way.
    """
    for request in requests:
        engine.add(request)
    totals, iterations = dict.fromkeys(SECTIONS, 0.0), 0
    while engine.has_work:
        step = engine.step()
        sections = timer.take()
        if step.kind == "prefill":
            continue
        iterations += step.kind == "pass" and step.stage == 0
        for name, seconds in sections.items():
            totals[name] += seconds
        totals["host"] += step.seconds - sum(sections.values())
    return {name: seconds / iterations for name, seconds in totals.items()} if iterations else None
