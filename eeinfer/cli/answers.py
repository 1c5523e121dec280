"""Answers on their way out: to a journal as they come; in the order of the prompts as JSON lines and marked text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.text import Text

from eeinfer.cli.meter import Meter
from eeinfer.cli.output import told
from eeinfer.cli.show import DepthPainter
from eeinfer.core.request import BatchCall, RequestOutput
from eeinfer.engine.answer_outcome import outcome_of
from eeinfer.engine.journal import Journal, encode_line
from eeinfer.engine.prompt_file import LineError, error_line, output_line

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class AnswerWriter:
    """Takes each answer as it comes. What is written in order waits until all before it are written.

    Attributes:
        journal: takes the lines of answers as they come; None: there is no file to fill.
        stream: takes all lines, in order; None: none are written.
        console: takes text marked by `painter`, in order; None: none is printed.
        painter: knows the exits of the model.
        meter: its progress bar makes way for what is printed.
        exits: whether the lines speak of depth.
        token_details: whether they have an entry a token.
        finish_reasons: answers by how they ended, `n` of a request; a request that failed is one, bad lines are none.
        answered: requests that have their answers.
        failures: what failed so far, by place.
        depths: tokens answered so far by layers executed.
    """

    journal: Journal | None
    stream: BinaryIO | None
    console: Console | None
    painter: DepthPainter
    meter: Meter
    exits: bool
    token_details: bool
    finish_reasons: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    depths: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, tuple[Mapping[str, Any], Text] | None] = field(default_factory=dict)
    _next: int = 0

    def put(self, place: int, output: RequestOutput, line_number: int | None, call: BatchCall | None = None) -> None:
        """Take the answer to the prompt at `place` (from 0), which stands in line `line_number` of its file.

        `call` is the OpenAI call that the prompt came as, if it did.
        """
        line = output_line(
            output, exits=self.exits, token_details=self.token_details, line_number=line_number, call=call
        )
        if self.journal is not None:
            self.journal.append(place, line)
        self._count(place, line, line_number)
        if output.error is None:
            self.depths.update(t.layers_executed for one in output.sequences for t in one.tokens)
            self._queue(place, line, partial(self.painter.answer, output))
        else:
            self._queue(place, line, partial(self.painter.failure, output.id, output.error))

    def put_bad_line(self, place: int, bad: LineError) -> None:
        """Take a line that is no request."""
        self.failures[place] = bad.message
        self._queue(place, error_line(bad), partial(self.painter.failure, bad.id, bad.message))

    def keep(self, place: int, line: Mapping[str, Any], line_number: int | None) -> None:
        """Count an answer that the journal holds from before."""
        self._count(place, line, line_number)
        self._queue(place, None, Text)

    def close(self) -> None:
        """Write what waits for answers that do not come, and the legend of the marked text."""
        for place in sorted(self._waiting):
            self._write(self._waiting.pop(place))
        if self.console and self.depths:
            self.console.print(self.painter.legend(self.depths), highlight=False)

    def _count(self, place: int, line: Mapping[str, Any], line_number: int | None) -> None:
        outcome = outcome_of(line)
        self.finish_reasons.update(outcome.finish_reasons)
        if outcome.error is None:
            self.answered += 1
            return
        where = "" if line_number is None else f"line {line_number}: "
        self.failures[place] = f"{where}{outcome.id}: {outcome.error}"

    def _queue(self, place: int, line: Mapping[str, Any] | None, paint: Callable[[], Text]) -> None:
        shown = self.stream or self.console
        self._waiting[place] = (line, paint() if self.console else Text()) if line is not None and shown else None
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def _write(self, written: tuple[Mapping[str, Any], Text] | None) -> None:
        if written is None:
            return
        line, text = written
        with self.meter.hidden():
            if self.stream:
                with told(getattr(self.stream, "name", "standard output")):
                    self.stream.write(encode_line(line))
                    self.stream.flush()
            if self.console:
                with told("standard output"):
                    self.console.print(text, soft_wrap=not self.console.is_terminal, highlight=False)
