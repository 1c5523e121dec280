"""Answers on their way out: in the order of the prompts, as JSON lines, as marked text, or both."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from eeinfer.cli.meter import Meter
from eeinfer.cli.show import DepthPainter
from eeinfer.core.request import Request, RequestOutput
from eeinfer.engine.prompt_file import LineError, error_line, output_line

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class AnswerWriter:
    """Writes each answer as soon as all before it are written.

    Attributes:
        file: takes JSON lines; None: none are written.
        console: takes text marked by `painter`; None: none is printed.
        painter: knows the exits of the model.
        meter: its progress bar makes way for what is printed.
        exits: whether the JSON lines speak of depth.
        token_details: whether they have an entry a token.
        failures: what failed so far, with its line or id.
        depths: tokens written so far by layers executed.
    """

    file: BinaryIO | None
    console: Console | None
    painter: DepthPainter
    meter: Meter
    exits: bool
    token_details: bool
    failures: list[str] = field(default_factory=list)
    depths: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, tuple[RequestOutput | LineError, Request | LineError]] = field(default_factory=dict)
    _next: int = 0

    def put(self, index: int, answer: RequestOutput | LineError, entry: Request | LineError) -> None:
        """Take the answer to `entry`, which is the prompt at `index` (from 0) of its file."""
        self._waiting[index] = answer, entry
        while self._next in self._waiting:
            self._write(*self._waiting.pop(self._next))
            self._next += 1

    def close(self) -> None:
        """Print the legend of the marked text."""
        if self.console and self.depths:
            self.console.print(self.painter.legend(self.depths), highlight=False)

    def _write(self, answer: RequestOutput | LineError, entry: Request | LineError) -> None:
        if isinstance(answer, LineError):
            line, text = error_line(answer), self.painter.failure(answer.id, answer.message)
            self.failures.append(answer.message)
        else:
            line = output_line(
                answer,
                exits=self.exits,
                token_details=self.token_details,
                line_number=entry.line,
                call=entry.call,
            )
            if answer.error is None:
                text = self.painter.answer(answer)
                self.depths.update(t.layers_executed for one in answer.sequences for t in one.tokens)
            else:
                text = self.painter.failure(answer.id, answer.error)
                self.failures.append(f"{answer.id}: {answer.error}")
        with self.meter.hidden():
            if self.file:
                self.file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                self.file.flush()
            if self.console:
                self.console.print(text, soft_wrap=not self.console.is_terminal, highlight=False)
