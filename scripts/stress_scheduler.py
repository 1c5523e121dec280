"""Random arrivals, cancellations, interrupts and plans, checked after every step as in the tests; a longer run.

    python scripts/stress_scheduler.py --steps 1000000 --seed 0

Each seed makes one small world: sizes, strategy, thresholds. A failure names the seed; `--seed N --steps 1` repeats it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from scheduler_world import random_event, random_world

EVENTS = 500  # in one world


def one_world(seed: int) -> Counter[str]:
    """Run one world to its end. Returns what came up in it."""
    world = random_world(Random(seed))  # noqa: S311 - not for secrets
    for _ in range(EVENTS):
        random_event(world)
    world.drain()
    stats = world.s.stats
    return world.counts + Counter(
        {
            "preempted": stats.preemptions,
            "evicted blocks": world.s.blocks.evictions,
            "prefix cache queries": stats.prefix_cache_queries,
            "prefix cache hits": stats.prefix_cache_hits,
        }
    )


def main() -> None:
    """Run worlds until the steps are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="plans to carry out (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first world (default %(default)s)")
    options = parser.parse_args()
    counts, started = Counter[str](), perf_counter()
    for seed in count(options.seed):
        if counts["steps"] >= options.steps:
            break
        try:
            counts += one_world(seed)
        except AssertionError:
            print(f"failed in the world of --seed {seed}", file=sys.stderr)
            raise
    print(
        f"{counts['steps']} steps in {seed - options.seed} worlds, {perf_counter() - started:.0f} s, each one checked"
    )
    for name, times in sorted(counts.items()):
        print(f"{times:>9} {name}")


if __name__ == "__main__":
    main()
