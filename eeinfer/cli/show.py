"""Answers with each token marked by the depth it left at: by colour on a terminal, by brackets elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from eeinfer.core.request import RequestOutput

# Vivid for shallow to muted for deep; each has a contrast of at least 4 to black and to white.
SCALE = ("#e5177b", "#d9480f", "#b26a00", "#7d8500", "#2b8a3e", "#0c8599", "#3a78c9", "#6f7f95")


@dataclass(frozen=True, slots=True)
class DepthPainter:
    """Renders answers.

    Attributes:
        exits: depths (layers executed) at which a token may leave, ascending.
        num_layers: full depth; its tokens stay plain.
        coloured: colours; otherwise a run of early tokens reads `‹18:text›`.
    """

    exits: Sequence[int]
    num_layers: int
    coloured: bool

    def answer(self, output: RequestOutput) -> Text:
        """One answer under its id."""
        text = Text.assemble((_visible(output.id), "bold"))
        if output.mean_layers is not None:
            text.append(f"  {output.mean_layers:.1f} of {self.num_layers} layers a token", "dim")
        for one in output.sequences:
            text.append("\n")
            for depth, group in groupby((t for t in one.tokens if t.text), key=lambda t: t.layers_executed):
                text.append_text(self._run(depth, _visible("".join(t.text for t in group))))
        return text.append("\n")

    def failure(self, request_id: str, message: str) -> Text:
        """What stands in the place of an answer that failed."""
        return Text.assemble((_visible(request_id), "bold"), (f"\nerror: {_visible(message)}\n", "red"))

    def legend(self, counts: Mapping[int, int]) -> Text:
        """What the marks mean, with the share of each in `counts` (tokens by layers executed)."""
        total = sum(counts.values())
        text = Text.assemble(("layers run:", "bold"))
        for depth in sorted({*self.exits, *counts, self.num_layers}):
            mark = f"■ {depth}" if self.coloured else "unmarked" if depth == self.num_layers else f"‹{depth}:›"
            text.append("  ").append(mark, self.style(depth)).append(f" {counts.get(depth, 0) / total:.1%}")
        return text

    def style(self, depth: int) -> str:
        """The rich style of a token that left after `depth` layers."""
        if not self.coloured or depth >= self.num_layers:
            return ""
        early = sorted({*self.exits, depth} - {self.num_layers})
        position = early.index(depth) / max(len(early) - 1, 1)
        return SCALE[round(position * (len(SCALE) - 1))]

    def _run(self, depth: int, run: str) -> Text:
        if self.coloured or depth >= self.num_layers:
            return Text(run, style=self.style(depth))
        body = run.rstrip("\n")
        breaks = len(run) - len(body)  # shown inside the mark, made after it
        return Text(f"‹{depth}:{body}{'↵' * breaks}›" + "\n" * breaks)


def shows_colours(console: Console) -> bool:
    """Whether `console` is a terminal (or FORCE_COLOR makes it one) that takes colours, without NO_COLOR."""
    return console.is_terminal and not console.no_color and console.color_system is not None


# Control characters, by which a model's text could drive the terminal.
_CONTROLS: dict[int, str] = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - set(map(ord, "\n\t\r")), "\ufffd")


def _visible(text: str) -> str:
    return text.translate(_CONTROLS).replace("\r", "")
