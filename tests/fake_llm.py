"""A fake LLM in place of the engine, and `eeinfer` run in this process with it."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

from eeinfer.cli.app import main
from eeinfer.config.schema import ModelSettings, Settings
from eeinfer.core.request import FinishReason, Request, RequestOutput, TokenRecord
from eeinfer.engine.build import locate
from eeinfer.errors import ModelError

ROOT = Path(__file__).parent.parent


@dataclass
class FakeStats:
    """FAKE: the counters that the command line reads."""

    generated_tokens: int = 0
    layers_executed: int = 0
    seconds: float = 2.0
    prefill_seconds: float = 0.5
    finished: int = 0
    failed: int = 0
    preemptions: int = 0
    made_up_hits: int = 3  # a counter that the command line has never heard of
    tokens_per_second: ClassVar[float] = 1.5
    mean_layers: ClassVar[float] = 24.0


class FakeLLM:
    """FAKE: answers a prompt with its words, the second of each leaving at 18 of 30 layers, last request first."""

    num_layers = 30
    exits: tuple[int, ...] = (18, 24)
    built: ClassVar[list[FakeLLM]] = []
    interrupt_after: int | None = None  # answers before Ctrl-C
    interrupts: int = 1  # times it is pressed
    in_flight: int = 1  # requests that run when it is

    @classmethod
    def from_loaded(
        cls,
        resolve: Callable[[Path | None], Any],
        *,
        note: Callable[[str], None],
        located: object = None,  # noqa: ARG003 - as the real one
    ) -> FakeLLM:
        resolve(None)
        llm = cls()
        llm.settings: Settings = resolve(None).settings
        llm.stats = FakeStats()
        llm.drained = False
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
        self.requests, self.stop = list(requests), len(requests)
        outputs: list[RequestOutput] = []
        on_step(self.stats)
        for request in reversed(requests) if self.interrupt_after is None else requests:
            if len(outputs) == self.interrupt_after:
                self.stop = len(outputs) + self.in_flight
                for _ in range(self.interrupts):
                    signal.raise_signal(signal.SIGINT)
                on_step(self.stats)
            if self.drained and len(outputs) == self.stop:
                break
            outputs.append(self._answer(request))
            on_output(outputs[-1])
            on_step(self.stats)
        return outputs

    def drain(self) -> None:
        self.drained = True

    def _answer(self, request: Request) -> RequestOutput:
        text = request.prompt or request.messages[-1]["content"]
        if text == "fail":
            self.stats.failed += 1
            return RequestOutput(request.id, "", FinishReason.ERROR, 0, (), "the prompt is too long")
        self.stats.finished += 1
        pieces = [word if i == 0 else f" {word}" for i, word in enumerate(text.split(" "))]
        tokens = tuple(TokenRecord(i, piece, (30, 18)[i % 2], (None, 0.9)[i % 2]) for i, piece in enumerate(pieces))
        self.stats.generated_tokens += len(tokens)
        output = RequestOutput(request.id, text, FinishReason.STOP, len(pieces), tokens)
        if request.sampling.n == 1:
            return output
        ends = [FinishReason.STOP, *[FinishReason.LENGTH] * (request.sampling.n - 1)]
        outputs = tuple(replace(output, index=i, finish_reason=end) for i, end in enumerate(ends))
        return replace(output, outputs=outputs)


def _located(real: Callable[..., Any], settings: ModelSettings, note: Callable[[str], None]) -> Any:
    """The model, or FAKE: one of 30 layers without heads where there is none."""
    try:
        return real(settings, note)
    except ModelError:
        base, config = SimpleNamespace(fingerprint=f"sha256:of-{settings.name}"), SimpleNamespace(num_layers=30)
        config.dtype = "bfloat16"
        return SimpleNamespace(folder=None, packaged_settings=None, base=base, config=config, heads=None)


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
    monkeypatch.setattr("eeinfer.engine.build.locate", partial(_located, locate))

    def _run(*arguments: str | Path, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["eeinfer", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        captured = capsys.readouterr()
        return Ended(code if isinstance(code, int) else 0, captured.out, captured.err)

    return _run
