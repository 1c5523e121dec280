"""From what the engine did to figures: speed, latency and depth of one run, and their summary over repeats.

All requests arrive at the start of a run, as in `vllm bench throughput`. Speeds are tokens a second, times seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median, median_high
from typing import Any

import numpy as np

from eeinfer.bench.record import Run
from eeinfer.core.request import FinishReason
from eeinfer.core.step import Step

LAYER_SECTIONS = ("stages", "attention")
SECTIONS = (*LAYER_SECTIONS, "checks", "completion", "vocabulary", "sampling", "host")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of one run.

    A *decode token* is any but an answer's first, which comes from its prompt at full depth and could not leave early.

    Attributes:
        seconds: from the start to the end of the last step.
        prefill_seconds: time of prompts, and of replays after preemption.
        decode_seconds: time of all other steps, passes and completions.
        requests, failed_requests: all, and those that ended with an error, whose tokens before it count.
        prompt_tokens: of all requests.
        generated_tokens: of all requests, end-of-sequence tokens included.
        decode_tokens: those that passes produced.
        decode_iterations: passes of stage 0.
        tokens_per_second: generated tokens over `seconds`; 0 when nothing ran.
        decode_tokens_per_second: decode tokens over `decode_seconds`; None without decode steps.
        requests_per_second: requests that did not fail, over `seconds`.
        ttft: time to first token of each request, from the start of the run, waiting included; None without a token.
        tpot: time per output token of each request, the first one excluded; None with fewer than two tokens.
        mean_layers: layers executed for a decode token, on average; None without any.
        exit_shares: share of the decode tokens by layers executed, shallowest first.
        involuntary_exits, involuntary_stays, preemptions, peak_blocks, peak_memory: see `eeinfer.bench.record.Run`.
    """

    seconds: float
    prefill_seconds: float
    decode_seconds: float
    requests: int
    failed_requests: int
    prompt_tokens: int
    generated_tokens: int
    decode_tokens: int
    decode_iterations: int
    tokens_per_second: float
    decode_tokens_per_second: float | None
    requests_per_second: float
    ttft: tuple[float | None, ...]
    tpot: tuple[float | None, ...]
    mean_layers: float | None
    exit_shares: dict[int, float]
    involuntary_exits: int
    involuntary_stays: int
    preemptions: int
    peak_blocks: int
    peak_memory: int | None


def run_figures(run: Run) -> RunFigures:
    """The figures of `run`."""
    seconds = run.steps[-1].ended - run.started if run.steps else 0.0
    decode = [step for step in run.steps if step.kind != "prefill"]
    decode_seconds = sum(step.seconds for step in decode)
    decode_tokens = sum(len(step.produced) for step in decode)
    generated = sum(len(step.produced) for step in run.steps)
    failed = sum(output.finish_reason is FinishReason.ERROR for output in run.outputs)
    times = _token_times(run.steps)
    gained = [times.get(output.id, []) for output in run.outputs]
    depths = Counter(token.layers_executed for output in run.outputs for token in output.tokens[1:])
    return RunFigures(
        seconds=seconds,
        prefill_seconds=sum(step.seconds for step in run.steps if step.kind == "prefill"),
        decode_seconds=decode_seconds,
        requests=len(run.outputs),
        failed_requests=failed,
        prompt_tokens=sum(output.prompt_tokens for output in run.outputs),
        generated_tokens=generated,
        decode_tokens=decode_tokens,
        decode_iterations=sum(step.kind == "pass" and step.stage == 0 for step in decode),
        tokens_per_second=_over(generated, seconds) or 0.0,
        decode_tokens_per_second=_over(decode_tokens, decode_seconds),
        requests_per_second=_over(len(run.outputs) - failed, seconds) or 0.0,
        ttft=tuple(ends[0] - run.started if ends else None for ends in gained),
        tpot=tuple((ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None for ends in gained),
        mean_layers=_over(sum(depth * count for depth, count in depths.items()), depths.total()),
        exit_shares={depth: depths[depth] / depths.total() for depth in sorted(depths)},
        involuntary_exits=run.involuntary_exits,
        involuntary_stays=run.involuntary_stays,
        preemptions=run.preemptions,
        peak_blocks=run.peak_blocks,
        peak_memory=run.peak_memory,
    )


def _token_times(steps: Iterable[Step]) -> dict[str, list[float]]:
    """Clock at the end of the step that gave each token, by request."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for request_id in step.produced:
            times.setdefault(request_id, []).append(step.ended)
    return times


def _over(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of a figure over the repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio(Spread):
    """Median, lowest and highest of a ratio over `pairs` pairs of runs."""

    pairs: int

    @property
    def in_noise(self) -> bool:
        """Whether the pairs do not agree that it differs from 1. One pair alone cannot tell, and is False."""
        return self.pairs > 1 and self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Over requests, linearly interpolated; each the median over the repeats."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one cell over its repeats: medians, but the highest of peaks. None or empty when no repeat has it.

    Attributes:
        repeats: that are complete.
        tokens_per_second, decode_tokens_per_second, requests_per_second, mean_layers, exit_shares,
            involuntary_exits, involuntary_stays, preemptions, peak_blocks, peak_memory: see `RunFigures`.
        failed_requests: in the worst repeat.
        ttft, tpot: seconds.
        speed_up, decode_speed_up: tokens/s and decode tokens/s over those of `full` in the same repeat; None for
            `full` itself.
        exit_efficiency: see `exit_efficiency`, by repeat; None where no layer was skipped, and without a breakdown of
            `full`.
    """

    repeats: int
    tokens_per_second: Spread | None
    decode_tokens_per_second: Spread | None
    requests_per_second: Spread | None
    speed_up: Ratio | None
    decode_speed_up: Ratio | None
    exit_efficiency: Ratio | None
    mean_layers: float | None
    exit_shares: dict[int, float]
    ttft: Percentiles | None
    tpot: Percentiles | None
    involuntary_exits: int | None
    involuntary_stays: int | None
    preemptions: int | None
    failed_requests: int | None
    peak_blocks: int | None
    peak_memory: int | None


def summarise(cell: Mapping[str, Any], full: Mapping[str, Any], num_layers: int) -> Summary:
    """The summary of a cell of a report.

    Args:
        cell: it.
        full: the cell of `full` in its group, whose repeat i pairs with repeat i of `cell`.
        num_layers: of the model.
    """
    repeats: Sequence[Mapping[str, Any]] = cell["repeats"]
    pairs = [] if cell["key"] == full["key"] else list(zip(repeats, full["repeats"], strict=False))
    layers, share = _each(repeats, "mean_layers"), layer_share(full["breakdown"])
    return Summary(
        repeats=len(repeats),
        tokens_per_second=_spread(_each(repeats, "tokens_per_second")),
        decode_tokens_per_second=_spread(_each(repeats, "decode_tokens_per_second")),
        requests_per_second=_spread(_each(repeats, "requests_per_second")),
        speed_up=ratio(_paired(pairs, "tokens_per_second")),
        decode_speed_up=ratio(_paired(pairs, "decode_tokens_per_second")),
        exit_efficiency=ratio(_efficiencies(pairs, share, num_layers)),
        mean_layers=median(layers) if layers else None,
        exit_shares=_shares([r["exit_shares"] for r in repeats]),
        ttft=_percentiles([r["ttft"] for r in repeats]),
        tpot=_percentiles([r["tpot"] for r in repeats]),
        involuntary_exits=_middle(_each(repeats, "involuntary_exits")),
        involuntary_stays=_middle(_each(repeats, "involuntary_stays")),
        preemptions=_middle(_each(repeats, "preemptions")),
        failed_requests=max(_each(repeats, "failed_requests"), default=None),
        peak_blocks=max(_each(repeats, "peak_blocks"), default=None),
        peak_memory=max(_each(repeats, "peak_memory"), default=None),
    )


def full_of(cells: Iterable[Mapping[str, Any]], key: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cell of `full` in the group of `key`: same batch, input and output length."""
    group = ("batch", "input_len", "output_len")
    return next(
        cell
        for cell in cells
        if cell["key"]["strategy"] == "full" and all(cell["key"][name] == key[name] for name in group)
    )


def layer_share(breakdown: Mapping[str, float] | None) -> float | None:
    """Share of a decode iteration spent in layers; None without a breakdown (seconds by section)."""
    return None if breakdown is None else _over(sum(breakdown[s] for s in LAYER_SECTIONS), sum(breakdown.values()))


def exit_efficiency(speed_up: float, *, layer_share: float, mean_layers: float, num_layers: int) -> float:
    """Measured speed-up of decoding over T / (T - saved), the one that the skipped layers alone would give.

    T is the decode time of `full`, saved its part in layers times the share of layers skipped. Nothing is subtracted
    for checks or completion. Prompts are left out: exits do not touch their time, which would only add its noise.

    Args:
        speed_up: decode tokens/s over those of `full`.
        layer_share: of the decode time of `full`, in layers.
        mean_layers: executed for a decode token.
        num_layers: of the model.
    """
    return speed_up * (1 - layer_share * (1 - mean_layers / num_layers))


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Of the values that are not None, linearly interpolated; None when there are none."""
    known = [value for value in values if value is not None]
    return Percentiles(*map(float, np.percentile(known, (50, 95, 99)))) if known else None


def ratio(values: Sequence[float]) -> Ratio | None:
    """The ratio that these pairs gave; None without any."""
    return Ratio(median(values), min(values), max(values), len(values)) if values else None


def _each(repeats: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [r[name] for r in repeats if r[name] is not None]


def _paired(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> list[float]:
    return [ours[name] / full[name] for ours, full in pairs if ours[name] is not None and full[name]]


def _efficiencies(
    pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], share: float | None, num_layers: int
) -> list[float]:
    found = []
    for ours, full in pairs:
        layers, base = ours["mean_layers"], full["decode_tokens_per_second"]
        if share is not None and layers is not None and layers < num_layers and base:
            speed_up = ours["decode_tokens_per_second"] / base
            found.append(exit_efficiency(speed_up, layer_share=share, mean_layers=layers, num_layers=num_layers))
    return found


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(median(values), min(values), max(values)) if values else None


def _middle(values: Sequence[int]) -> int | None:
    return median_high(values) if values else None


def _shares(repeats: Iterable[Mapping[Any, float]]) -> dict[int, float]:
    """Mean share by depth, so that they add up to 1; depths are text in a file."""
    known = [{int(depth): share for depth, share in shares.items()} for shares in repeats if shares]
    depths = sorted({depth for shares in known for depth in shares})
    return {depth: sum(shares.get(depth, 0.0) for shares in known) / len(known) for depth in depths}


def _percentiles(repeats: Iterable[Iterable[float | None]]) -> Percentiles | None:
    runs = [found for values in repeats if (found := percentiles(values))]
    return Percentiles(*(median(at) for at in zip(*map(astuple, runs), strict=True))) if runs else None
