"""The figures of a run of `generate`: the file of `--stats`, and what standard error shows at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from eeinfer.engine.engine import Stats

# Counters that have a line of their own in the summary, or are part of one.
_TOLD = frozenset({"generated_tokens", "layers_executed", "finished", "failed"})


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What is known of a run at its end.

    Attributes:
        total: lines of the prompt file; failed: those without an answer, for whatever reason.
        kept: answers that an interrupted run had made.
        answered: requests that have their answers, those of the interrupted run included.
        finish_reasons: answers by how they ended, likewise; a request has `n` of them, one that failed has one.
        load_seconds: to read the model; None when nothing was left to answer.
        stats: counters of the engine; None likewise.
        num_layers: of the model.
        depths: tokens answered now, by layers executed.
    """

    total: int
    failed: int
    kept: int
    answered: int
    finish_reasons: Mapping[str, int]
    load_seconds: float | None
    stats: Stats | None
    num_layers: int
    depths: Mapping[int, int]

    @property
    def bad_lines(self) -> int:
        """Lines that are no requests."""
        return self.failed - self.finish_reasons.get("error", 0)

    @property
    def exit_shares(self) -> dict[int, float]:
        """Share of the tokens by layers executed, shallowest first."""
        total = sum(self.depths.values())
        return {depth: self.depths[depth] / total for depth in sorted(self.depths)}

    def to_json(self) -> dict[str, Any]:
        """All figures; times in seconds. Times, tokens and counters leave out the run that this one goes on with."""
        stats = self.stats
        return {
            "requests": {
                "total": self.total,
                "ok": self.answered,
                "failed": self.failed,
                "bad_lines": self.bad_lines,
                "unanswered": self.total - self.answered - self.failed,
                "kept": self.kept,
                "finish_reasons": dict(self.finish_reasons),
            },
            "seconds": _phases(stats, self.load_seconds) if stats else {},
            "tokens_per_second": stats.tokens_per_second if stats else None,
            "mean_layers": stats.mean_layers if stats else None,
            "num_layers": self.num_layers,
            "exit_shares": {str(depth): share for depth, share in self.exit_shares.items()},
            "counters": asdict(stats) if stats else {},
        }

    def print(self, console: Console) -> None:
        """A line a subject."""
        table = Table.grid(padding=(0, 2))
        for subject, words in self._lines():
            table.add_row(subject, words)
        console.print(table, highlight=False)

    def _lines(self) -> Iterator[tuple[str, str]]:
        ended = ", ".join(f"{reason} {count}" for reason, count in sorted(self.finish_reasons.items()) if count)
        requests = [f"{self.answered} answered" + (f" ({ended})" if ended else "")]
        requests += [f"{self.failed} failed"] if self.failed else []
        requests += [f"{self.kept} kept from the run before"] if self.kept else []
        yield "requests", ", ".join(requests)
        if (stats := self.stats) is None:
            return
        yield "tokens", f"{stats.generated_tokens} in {stats.seconds:.1f} s, {stats.tokens_per_second:.1f} tokens/s"
        phases = _phases(stats, self.load_seconds)
        yield "time", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items())
        if len(self.depths) > 1 and stats.mean_layers is not None:
            shares = ", ".join(f"{depth}: {share:.1%}" for depth, share in self.exit_shares.items())
            yield "layers", f"{stats.mean_layers:.1f} of {self.num_layers} a token; left at {shares}"
        counters = {name: value for name, value in asdict(stats).items() if isinstance(value, int) and value}
        told = [f"{name.replace('_', ' ')} {value}" for name, value in counters.items() if name not in _TOLD]
        if told:
            yield "counters", ", ".join(told)


def _phases(stats: Stats, load_seconds: float | None) -> dict[str, float]:
    """Seconds by phase; decoding is what is not spent on prompts."""
    decode = stats.seconds - stats.prefill_seconds
    return {"load": load_seconds or 0.0, "prefill": stats.prefill_seconds, "decode": decode}
