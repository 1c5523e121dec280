"""Engines beside each other: rounds of A B C D, each waiting while another has its turn, and the figures of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product, takewhile
from statistics import fmean
from time import perf_counter, sleep

from peers.engines import Answer, Engine, EngineError

from eeinfer.bench.metrics import Ratio, ratio

# Engines go on polling for work after a turn (vLLM for a second, threads of Intel's OpenMP for 0.2 s) and would take a
# core from the next one. A turn begins when they took less than BUSY of a core for a pause, or after MOST_PAUSES.
PAUSE_SECONDS = 0.5
MOST_PAUSES = 10
BUSY = 0.05
TICKS = 0.02  # seconds: the kernel counts processor time in steps of 0.01, which in a short turn would look busy


@dataclass(slots=True)
class Cell:
    """What one engine did with one batch size. `answers` are by round, from 0; an engine that died has fewer."""

    engine: str
    batch: int
    output_len: int
    answers: dict[int, Answer] = field(default_factory=dict)

    def speed(self, number: int) -> float:
        """Tokens/s of a round, prompts included."""
        return self.batch * self.output_len / self.answers[number].seconds

    def decode_speed(self, number: int) -> float | None:
        """Tokens/s of a round after each answer's first token; None where the engine cannot tell."""
        seconds = self.answers[number].decode_seconds
        return self.batch * (self.output_len - 1) / seconds if seconds else None


class Comparison:
    """Runs all engines on the same prompts.

    Args:
        engines: not loaded yet, in the order of their turns.
        prompts: token ids, all of one length, as many as the largest batch; smaller batches take the first ones.
        output_len: new tokens of each prompt, at least 2.
        pause: seconds before each turn, or some times that until the other engines rest.

    Attributes:
        engines: all of them, failed ones too.
        cells: by engine name and batch size.
        failures: why an engine is out, by name.
        start_up: seconds that an engine took to load, by name.
        idle: most processor time that an engine took while others had their turns, as a share of one core, by name.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        prompts: Sequence[Sequence[int]],
        output_len: int,
        *,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self.engines, self._alive = tuple(engines), list(engines)
        self._prompts, self._output_len, self._pause = prompts, output_len, pause
        self.cells: dict[tuple[str, int], Cell] = {}
        self.failures: dict[str, str] = {}
        self.start_up: dict[str, float] = {}
        self.idle: dict[str, float] = {}

    def load(self, show: Callable[[str], None]) -> None:
        """Start the engines one after the other. `show` is told what goes on."""
        for engine in list(self._alive):
            show(f"loading {engine.name}")
            started = perf_counter()
            with self._dropped_if_it_fails(engine):
                engine.load()
                self.start_up[engine.name] = perf_counter() - started

    def measure(self, batches: Sequence[int], warmup: int, repeats: int, show: Callable[[str], None]) -> None:
        """For each batch size, rounds in which each engine has one turn; the first `warmup` rounds are not kept."""
        for batch, number in product(batches, range(-warmup, repeats)):
            for engine in list(self._alive):
                what = f"round {number + 1} of {repeats}" if number >= 0 else "warm-up"
                show(f"batch {batch}, {what}: {engine.name}")
                self._turn(engine, batch, number)

    def close(self) -> None:
        """End all engines."""
        for engine in self.engines:
            engine.close()

    def _turn(self, engine: Engine, batch: int, number: int) -> None:
        waiting = [other for other in self._alive if other is not engine]
        self._settle(waiting)
        before, started = [other.processor_seconds() for other in waiting], perf_counter()
        with self._dropped_if_it_fails(engine):
            answer = engine.run(self._prompts[:batch], self._output_len)
            if number >= 0:
                cell = Cell(engine.name, batch, self._output_len)
                self.cells.setdefault((engine.name, batch), cell).answers[number] = answer
        seconds = perf_counter() - started
        for other, had in zip(waiting, before, strict=True):
            share = max(0.0, other.processor_seconds() - had - TICKS) / seconds
            self.idle[other.name] = max(self.idle.get(other.name, 0.0), share)

    def _settle(self, waiting: Sequence[Engine]) -> None:
        for _ in range(MOST_PAUSES):
            before = sum(engine.processor_seconds() for engine in waiting)
            sleep(self._pause)
            if sum(engine.processor_seconds() for engine in waiting) - before <= BUSY * self._pause:
                break

    @contextmanager
    def _dropped_if_it_fails(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self.failures[engine.name] = str(error)
            self._alive.remove(engine)
            engine.close()


def paired(mine: Cell, theirs: Cell, speed: Callable[[Cell, int], float | None]) -> Ratio | None:
    """Ratio of a speed of `mine` over that of `theirs`, round by round where both have it; None without a round."""
    shared = sorted(mine.answers.keys() & theirs.answers.keys())
    pairs = [(speed(mine, number), speed(theirs, number)) for number in shared]
    return ratio([a / b for a, b in pairs if a is not None and b is not None])


def agreement(mine: Cell, theirs: Cell) -> float | None:
    """Share of the tokens of `mine` before the first that `theirs` has otherwise, mean over prompts. None: no ids."""
    a, b = (list(cell.answers.values())[-1].token_ids for cell in (mine, theirs))
    if a is None or b is None:
        return None
    return fmean(_equal_start(x, y) / len(x) for x, y in zip(a, b, strict=True))


def _equal_start(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
