"""What scheduling costs the host: microseconds a row a step, with few and with many sequences that wait.

    python scripts/time_scheduler.py --waiting 16,256,4096 --running 64

Nothing is computed: verdicts are made up. Under `split` with two exits, a third of the rows leaves at each. Who has
its answer is followed by a new arrival, so that as many go on waiting. The turns of the sizes alternate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Many
from itertools import count
from random import Random
from statistics import median
from time import perf_counter

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Complete, Outcome, Pass, Plan, Prefill, Verdict
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.sequence import Sequence
from eeinfer.core.strategy import leave_rule

STAGE_ENDS = (10, 20, 30)
BLOCK_SIZE, PROMPT, ANSWER = 16, 64, 64
ITERATIONS = 200  # of one turn


class Queue:
    """A scheduler with `running` sequences in flight and `waiting` behind them."""

    def __init__(self, running: int, waiting: int, *, prefix_cache: bool) -> None:
        blocks = (running + 1) * -(-(PROMPT + ANSWER + BLOCK_SIZE) // BLOCK_SIZE)
        self._scheduler = Scheduler(
            BlockManager(blocks, BLOCK_SIZE, prefix_cache=prefix_cache),
            STAGE_ENDS,
            leave_rule("split", sticky=False),
            approximate=True,
            max_num_seqs=running,
            max_num_batched_tokens=2048,
        )
        self._numbers, self._random = count(), Random(0)  # noqa: S311 - not for secrets
        for _ in range(running + waiting):
            self._arrive()

    def turn(self) -> float:
        """Microseconds a row of an iteration, with the admission of those that take the places of the finished."""
        rows, iterations, seconds = 0, 0, 0.0
        while iterations < ITERATIONS:
            started = perf_counter()
            plan = self._scheduler.next()
            seconds += perf_counter() - started
            assert plan is not None, "somebody always waits"
            outcome = _outcome(plan)
            started = perf_counter()
            touched = self._scheduler.commit(plan, outcome)
            seconds += perf_counter() - started
            if isinstance(plan, Pass) and plan.stage == 0:
                rows, iterations = rows + len(plan.rows), iterations + 1
            for sequence in touched:
                if sequence.finish_reason is not None:
                    self._arrive()
        return seconds / rows * 1e6

    def _arrive(self) -> None:
        number = next(self._numbers)
        prompt = self._random.choices(range(1, 50_000), k=PROMPT)
        answer = ANSWER // 2 + number % ANSWER // 2  # of different lengths, so that they do not end together
        self._scheduler.add(Sequence(str(number), prompt, answer, frozenset({0})))


def _outcome(plan: Plan) -> Outcome:
    match plan:
        case Prefill(spans):
            return tuple(Verdict(token=None if span.draw is None else 1) for span in spans)
        case Pass(stage, rows):
            last = stage == len(STAGE_ENDS) - 1
            ready = [(row.slot + row.position) % len(STAGE_ENDS) == stage for row in rows]
            return tuple(Verdict(token=1 if last or own else None, confidence=0.5, ready=own) for own in ready)
        case Complete():
            return ()


def main() -> None:
    """Print a line for each number of waiting sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", default="16,256,4096", help="how many wait, each a line (default %(default)s)")
    parser.add_argument("--running", type=int, default=64, help="sequences in flight (default %(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="of each (default %(default)s)")
    parser.add_argument("--no-prefix-cache", action="store_true", help="blocks are not kept to be shared")
    options = parser.parse_args()
    sizes: Many[int] = [int(size) for size in options.waiting.split(",")]
    queues = {size: Queue(options.running, size, prefix_cache=not options.no_prefix_cache) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(options.turns + 1):
        for size, queue in queues.items():
            cost = queue.turn()
            if turn:  # the first fills the seats
                found[size].append(cost)
    for size, costs in found.items():
        print(
            f"{size:>6} waiting: {median(costs):.2f} us a row a step ({min(costs):.2f} to {max(costs):.2f}), "
            f"{options.running} in flight"
        )


if __name__ == "__main__":
    main()
