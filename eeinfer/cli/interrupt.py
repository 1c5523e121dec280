"""Ctrl-C while answers are made: once, what runs is finished; twice, the run stops after the step in progress."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_AT_ONCE = 2


class Interrupts:
    """Counts Ctrl-C, and acts on it between the steps of the engine, where no finished answer is on its way.

    Before the first step nothing runs that could be finished, and a third Ctrl-C does not wait for a step that hangs:
    then KeyboardInterrupt is raised on the spot.

    Args:
        drain: starts no more requests.
        note: takes one-line notices.

    Attributes:
        draining: whether `drain` was called.
    """

    def __init__(self, drain: Callable[[], None], note: Callable[[str], None]) -> None:
        self.draining = False
        self._drain = drain
        self._note = note
        self._count = 0
        self._steps = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Takes Ctrl-C, unless it is ignored or taken already, as in the background of a shell script."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def step(self) -> None:
        """To be called after each step.

        Raises:
            KeyboardInterrupt: after the second Ctrl-C.
        """
        self._steps += 1
        if self._count >= _AT_ONCE:
            raise KeyboardInterrupt
        if self._count and not self.draining:
            self.draining = True
            self._drain()
            self._note("stopping: answers in progress are finished and no others started; Ctrl-C again stops at once")

    def _take(self, _signal: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._steps == 0 or self._count > _AT_ONCE:
            raise KeyboardInterrupt
