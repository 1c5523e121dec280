"""Runs and reports made by hand, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eeinfer.bench.metrics import SECTIONS, run_figures
from eeinfer.bench.quality import Quality
from eeinfer.bench.record import CellKey, Run
from eeinfer.bench.report import CellEntry, Report, to_report
from eeinfer.core.request import FinishReason, RequestOutput, TokenRecord
from eeinfer.core.step import Step


def output(name: str, depths: Sequence[int], *, prompt: int = 4, error: str | None = None) -> RequestOutput:
    tokens = tuple(TokenRecord(7, "", depth, None) for depth in depths)
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    return RequestOutput(name, "", reason, prompt, tokens, error)


class FakeClock:
    """Steps back to back from 100 s on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.steps: list[Step] = []

    def prefill(self, seconds: float, *produced: str) -> None:
        self._step("prefill", -1, seconds, produced)

    def stage(self, stage: int, seconds: float, *produced: str) -> None:
        self._step("pass", stage, seconds, produced)

    def complete(self, seconds: float) -> None:
        self._step("complete", -1, seconds, ())

    def _step(self, kind: Any, stage: int, seconds: float, produced: tuple[str, ...]) -> None:
        self.now += seconds
        self.steps.append(Step(kind, stage, 1, 0, seconds, self.now, produced, ()))

    def run(self, *outputs: RequestOutput, memory: int | None = 2**30) -> Run:
        return Run(100.0, tuple(self.steps), outputs, 1, 2, 3, 40, memory)


def plain_run(seconds: float, depths: Sequence[int], memory: int | None = 2**30) -> Run:
    """One request: 0.1 s of prefill, then a token a pass of equal length, until `seconds` are over."""
    clock = FakeClock()
    clock.prefill(0.1, "a")
    for _ in depths:
        clock.stage(0, (seconds - 0.1) / len(depths), "a")
    return clock.run(output("a", [30, *depths]), memory=memory)


def cell(
    strategy: str = "full",
    seconds: Sequence[float] = (2.0, 2.1, 1.9),
    depths: Sequence[int] = (30, 30, 30, 30),
    *,
    batch: int = 32,
    threshold: tuple[float, ...] = (0.9, 0.85),
    judged: bool = True,
    timed: bool = True,
    **given: Any,
) -> CellEntry:
    full = strategy == "full"
    exits, thresholds = ((), ()) if full else ((18, 21), threshold)
    return CellEntry(
        key=CellKey(strategy, batch, None, 64, exits, thresholds),
        warmup_seconds=0.5,
        repeats=tuple(run_figures(plain_run(s, depths, **given)) for s in seconds),
        breakdown=dict(zip(SECTIONS, (0.01, 0.004, 0.002, 0.001, 0.002, 0.0005, 0.0005), strict=True))
        if timed
        else None,
        quality=Quality(0.0125, 0.025, 0.75, 0.05, None, None, 0) if judged else None,
        roofline=None,
    )


def report(*cells: CellEntry, **given: Any) -> Report:
    workload: dict[str, Any] = {
        "source": "packaged",
        "fingerprint": "sha256:0",
        "num_prompts": 32,
        "prompt_tokens": 4096,
        "ignore_eos": False,
        "seed": 0,
        "warmup": 1,
        "repeats": 3,
        "simulate_exits": None,
        "trace": None,
    }
    model: dict[str, Any] = {
        "name": "tiny",
        "fingerprint": None,
        "num_layers": 30,
        "hidden_size": 64,
        "vocab_size": 100,
        "dtype": "bfloat16",
        "weight_bytes": 1000,
        "random_weights": False,
    }
    return to_report(
        environment={"device": "cpu", "cpu": "a CPU", "threads": 2},
        command=["bench"],
        settings={"exits.threshold": (float("inf"),), "batching.sticky": False},
        model=model | given.pop("model", {}),
        workload=workload | given.pop("workload", {}),
        cells=cells or (cell(), cell("split", (1.6, 1.9, 1.5), (18, 21, 30, 21))),
        **given,
    )
