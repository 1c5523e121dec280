"""A fake LLM in place of the engine, and `eeinfer` run in this process with it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest

from eeinfer.cli.app import main
from eeinfer.config.schema import Settings
from eeinfer.core.request import FinishReason, Request, RequestOutput, TokenRecord

ROOT = Path(__file__).parent.parent


class FakeStats:
    """FAKE: the counters that the command line reads."""

    def __init__(self) -> None:
        self.generated_tokens = self.finished = self.failed = self.preemptions = 0
        self.involuntary_exits = self.involuntary_stays = self.peak_blocks = 0
        self.seconds, self.tokens_per_second, self.mean_layers = 2.0, 1.5, 24.0


class FakeLLM:
    """FAKE: answers a prompt with its words, the second of each leaving at 18 of 30 layers, last request first."""

    num_layers = 30
    exits: tuple[int, ...] = (18, 24)
    built: ClassVar[list[FakeLLM]] = []
    interrupt_after: int | None = None

    @classmethod
    def from_loaded(cls, resolve: Callable[[Path | None], Any], *, note: Callable[[str], None]) -> FakeLLM:
        resolve(None)
        llm = cls()
        llm.settings: Settings = resolve(None).settings
        llm.stats = FakeStats()
        note("loaded")
        cls.built.append(llm)
        return llm

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_output: Callable[[RequestOutput], None],
        on_step: Callable[[FakeStats], None],
    ) -> list[RequestOutput]:
        self.requests = list(requests)
        for done, request in enumerate(reversed(requests) if self.interrupt_after is None else requests):
            if done == self.interrupt_after:
                raise KeyboardInterrupt
            on_output(self._answer(request))
            on_step(self.stats)
        return []

    def _answer(self, request: Request) -> RequestOutput:
        text = request.prompt or request.messages[-1]["content"]
        if text == "fail":
            self.stats.failed += 1
            return RequestOutput(request.id, "", FinishReason.ERROR, 0, (), "the prompt is too long")
        self.stats.finished += 1
        pieces = [word if i == 0 else f" {word}" for i, word in enumerate(text.split(" "))]
        tokens = tuple(TokenRecord(i, piece, (30, 18)[i % 2], (None, 0.9)[i % 2]) for i, piece in enumerate(pieces))
        self.stats.generated_tokens += len(tokens)
        return RequestOutput(request.id, text, FinishReason.STOP, len(pieces), tokens)


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ended]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `eeinfer ARGS` in this process, with the fake engine."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    engine = ModuleType("eeinfer.engine.llm")
    engine.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "eeinfer.engine.llm", engine)
    monkeypatch.setattr(FakeLLM, "built", [])

    def _run(*arguments: str | Path, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["eeinfer", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        captured = capsys.readouterr()
        return Ended(code if isinstance(code, int) else 0, captured.out, captured.err)

    return _run
