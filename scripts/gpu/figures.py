"""Speed on models of known shapes with random weights: against the floor of memory, and against full depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from gpu.baseline import transformers_rate
from gpu.place import Place, median_of, tiny_config
from gpu.race import Racer, Work, check_fits, race, racer
from gpu.report import Cell, DoesNotFitError, Entry, Report, Target
from gpu.trace import Timeline, timeline
from torch import Tensor

from eeinfer.bench.breakdown import TimedDecoder, TimedRunner, breakdown, timer_for
from eeinfer.bench.metrics import RunFigures, exit_efficiency, layer_share, run_figures
from eeinfer.bench.probes import Probes, probe
from eeinfer.bench.roofline import Measured, WorkCounter, best_rates, cell_entry
from eeinfer.bench.workload import limited
from eeinfer.engine.build import Model, new_decoder
from eeinfer.model.families import ModelConfig
from eeinfer.model.random_weights import random_weights, shape_config
from eeinfer.model.tokenizer import NoTokenizer
from eeinfer.model.weights import weight_bytes
from eeinfer.runner.sizing import cache_shape

PROFILED_TOKENS = 16
FULL = {"batching__strategy": "full"}
EAGER_TORCH = {"model__kernels": "torch", "model__enforce_eager": True}


@dataclass(slots=True)
class Bench:
    """One model shape on the device, and what was measured on it.

    Attributes:
        place: the device.
        report: takes the targets.
        name: of the shape.
        model: in memory once the first cell has made it.
        probes: what the memory and the arithmetic of the device give at best.
        baseline: tokens a second of transformers (or of plain torch) by batch and context.
    """

    place: Place
    report: Report
    name: str
    model: Model | None = None
    probes: Probes | None = None
    baseline: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return tiny_config(dry=True) if self.place.dry else shape_config(self.name)

    def loaded(self) -> Model:
        """The model, made up at the first call."""
        if self.model is None:
            needed, free = weight_bytes(self.config, torch.bfloat16), self.place.free()
            if needed > free:
                raise DoesNotFitError(f"weights of {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
            settings = self.place.settings(model__kernels=self.place.kernels, model__dtype="bfloat16").model
            weights = random_weights(self.config, torch.bfloat16, self.place.device, seed=0)
            self.model = Model(new_decoder(settings, self.config, weights, print), NoTokenizer())
        return self.model

    def split(self) -> dict[str, Any]:
        """Settings of an exit in the middle whose check costs next to nothing, as a gate's does."""
        middle = self.config.num_layers // 2
        return {
            "batching__strategy": "split",
            "exits__layers": (middle,),
            "exits__threshold": 0.5,
            "exits__measure": "similarity",
        }


def cells(place: Place, report: Report) -> Iterator[Cell]:
    """The cells: first what they are held against, then the models."""
    main = Bench(place, report, "llama-3.1-8b")
    yield Cell("figures: baseline", 45, lambda: _baseline(main))
    yield Cell("figures: what the device gives", 10, lambda: _probes(main))
    yield Cell("figures: memory", 15, lambda: _memory(main))
    dry = place.dry
    short, long = (6, 9) if dry else (128, 2048)
    for batch, seconds in ((1, 20), (3 if dry else 64, 35)):
        yield _cell(main, Work(batch, short, 5 if dry else 64), (0.0, 0.5), seconds)
    yield _cell(main, Work(3 if dry else 64, long, 5 if dry else 64), (0.5,), 45)
    if place.full:
        yield from _more(main, report)


def _more(main: Bench, report: Report) -> Iterator[Cell]:
    """Other batches, contexts, blocks and shapes."""
    dry = main.place.dry
    if dry:
        yield _cell(main, Work(2, 6, 4, block_size=32), (0.5,), 5)
        return
    yield _cell(main, Work(256, 128, 64), (0.0, 0.5), 45)
    yield _cell(main, Work(32, 8192, 64), (0.5,), 60)
    for block_size in (32, 64, 256):
        yield _cell(main, Work(64, 2048, 64, block_size), (), 30)
    for name in ("qwen3-8b", "llama-3.2-1b", "qwen2.5-0.5b"):
        other = Bench(main.place, report, name, probes=main.probes)
        for batch in (1, 64):
            yield _cell(other, Work(batch, 128, 64), (0.0, 0.5), 40)


def _cell(bench: Bench, work: Work, rates: Sequence[float], seconds: float) -> Cell:
    return Cell(f"figures: {bench.name}, {work}", seconds, lambda: _race(bench, work, rates))


def _baseline(bench: Bench) -> Entry:
    """Transformers where it can be imported, else the same model by plain torch without graphs."""
    batch, context, new = (3, 6, 4) if bench.place.dry else (64, 128, 33)
    rate = transformers_rate(bench.place, bench.config, batch, context, new)
    if isinstance(rate, str):
        name, why = "plain torch", f" ({rate})"
        racer_ = _plain_torch(bench, Work(batch, context, new))
        rate = run_figures(racer_.runs[0]).decode_tokens_per_second or 0.0
    else:
        name, why = "transformers", ""
    bench.baseline[batch, context] = rate
    return {
        "who": name,
        "batch": batch,
        "tokens_per_second": rate,
        "line": f"{name}{why}: {rate:.0f} tokens/s at batch {batch}",
    }


def _plain_torch(bench: Bench, work: Work) -> Racer:
    settings = bench.place.settings(model__kernels="torch", model__dtype="bfloat16").model
    model = bench.loaded()
    plain = Model(new_decoder(settings, bench.config, model.decoder.weights, print), NoTokenizer())
    check_fits(bench.place, plain, work, 1)
    one = racer(bench.place, plain, work, "plain torch", FULL | EAGER_TORCH)
    race([one], 1)
    return one


def _probes(bench: Bench) -> Entry:
    decoder = bench.loaded().decoder
    bench.probes = found = probe(decoder.config, decoder.dtype, decoder.device, seconds=0.1 if bench.place.dry else 3.0)
    read, matrix = max(found.read.values()), max(found.matrix.values())
    line = f"reads {read / 1e12:.2f} TB/s, multiplies {matrix / 1e12:.0f} TFLOP/s at best"
    return {"probes": asdict(found), "line": line}


def _memory(bench: Bench) -> Entry:
    """The cache that the engine would size for itself, from a run that measures what the rest takes."""
    model = bench.loaded()
    decoder = model.decoder
    settings = bench.place.settings(**FULL, batching__max_num_seqs=2 if bench.place.dry else 64)
    free = bench.place.free()
    blocks = cache_shape(settings, decoder, [], captures=True).num_blocks
    tokens = blocks * settings.cache.block_size
    weights = weight_bytes(decoder.config, decoder.dtype)
    return {
        "blocks": blocks,
        "tokens": tokens,
        "free_bytes": free,
        "weight_bytes": weights,
        "line": f"weights {weights / 2**30:.1f} GiB, free {free / 2**30:.1f}, cache {blocks} blocks, {tokens} tokens",
    }


def _race(bench: Bench, work: Work, rates: Sequence[float]) -> Entry:
    """Full depth, and `split` at each rate, in turns."""
    place, model = bench.place, bench.loaded()
    check_fits(place, model, work, 2 if rates else 1)
    full = racer(place, model, work, "full", FULL)
    racers = [full]
    if rates:
        shared = racer(place, model, work, "split", bench.split())
        middle = bench.config.num_layers // 2
        racers += [replace(shared, label=f"split at {r:g}", exit_rates={middle: r}, runs=[], shares=[]) for r in rates]
    race(racers, 1 if place.dry else 3)
    figures = {one.label: [run_figures(run) for run in one.runs] for one in racers}
    entry: Entry = {
        "built": {
            one.label: {"seconds": one.built, "notes": one.notes, "captured": one.engine.runner.graphs is not None}
            for one in racers
        }
    }
    entry |= {one.label: _told(one, figures) for one in racers}
    entry["roofline"] = roofline = {one.label: _roofline(bench, work, one) for one in racers}
    entry["device"] = device = {one.label: _device(place, one, entry[one.label]["step_seconds"][0]) for one in racers}
    entry["breakdown"] = parts = _parts(bench, work, full.engine.runner.cache)
    entry["exit_efficiency"] = {
        one.label: _efficiency(bench, figures[one.label], figures["full"], parts) for one in racers[1:]
    }
    _targets(bench, work, entry)
    floor, gap = roofline["full"], device["full"]
    entry["line"] = (
        f"full {_ms(entry['full']['step_seconds'])}, {_times(floor)} of the floor, host gap {gap['host_share']:.1%}; "
        + "; ".join(f"{one.label} {entry[one.label]['over_full'][0]:.3f} of full" for one in racers[1:])
        + f"; {_shares(gap['kinds'])}; peak {entry['full']['peak_memory'] / 2**30:.1f} GiB"
    )
    return entry


def _told(one: Racer, figures: Mapping[str, Sequence[RunFigures]]) -> Entry:
    """Medians with lowest and highest: of a step, of decoding, and of decoding over full depth in the same round."""
    own, full = figures[one.label], figures["full"]
    speeds = [f.decode_tokens_per_second or 0.0 for f in own]
    base = [f.decode_tokens_per_second or 0.0 for f in full]
    steps = [
        sum(s.seconds for s in run.steps if s.kind != "prefill") / max(f.decode_iterations, 1)
        for run, f in zip(one.runs, own, strict=True)
    ]
    return {
        "step_seconds": median_of(steps),
        "decode_tokens_per_second": median_of(speeds),
        "over_full": median_of(speed / other for speed, other in zip(speeds, base, strict=True)),
        "mean_layers": own[-1].mean_layers,
        "outside_of_runner": median_of(one.shares),
        "peak_memory": max(f.peak_memory or 0 for f in own),
        "peak_blocks": own[-1].peak_blocks,
    }


def _roofline(bench: Bench, work: Work, one: Racer) -> Entry | None:
    if bench.probes is None:
        return None
    decoder = bench.loaded().decoder
    ends = (0, *(e.head.layers_executed for e in one.engine.runner.exits), decoder.num_layers)
    counter = WorkCounter(decoder.config, decoder.dtype, [b - a for a, b in pairwise(ends)], "similarity")
    measured = Measured(f"{one.label}, {work}", counter, one.runs)
    return cell_entry(best_rates(bench.probes, [measured]), measured)


def _device(place: Place, one: Racer, step_seconds: float) -> Entry:
    """What the device did while a few tokens were decoded.

    Profiling slows the host down. So the host's share is of a step that was not profiled: what the device did not need.
    """
    engine = one.engine
    new = min(PROFILED_TOKENS, one.requests[0].sampling.max_tokens or 1)
    one.run()  # sets the rates
    for request in limited(one.requests, new, ignore_eos=True):
        engine.add(request)
    while engine.has_work and engine.step().kind == "prefill":
        pass
    iterations = 0

    def rest() -> None:
        nonlocal iterations
        while engine.has_work:
            step = engine.step()
            iterations += step.kind == "pass" and step.stage == 0

    found: Timeline = timeline(place, rest)
    active = (found.span - found.host) / max(iterations, 1)
    return {
        "host_share": max(0.0, 1 - active / step_seconds),
        "active_seconds_per_iteration": active,
        "busy_seconds_per_iteration": found.busy / max(iterations, 1),
        "profiled_host_share": found.host / (found.span or 1.0),
        "kinds": {kind: seconds / (sum(found.kinds.values()) or 1.0) for kind, seconds in found.kinds.items()},
        "kernels": found.names,
    }


def _parts(bench: Bench, work: Work, cache: Tensor) -> dict[str, float] | None:
    """Seconds of an iteration of `full` by section, without graphs and with a wait after each."""
    model, place = bench.loaded(), bench.place
    timer = timer_for(place.device)
    timed = replace(model, decoder=TimedDecoder(model.decoder, timer))
    eager = FULL | {"model__enforce_eager": True}
    one = racer(place, timed, work, "full", eager, cache=cache, runner_class=TimedRunner)
    return breakdown(one.engine, timer, limited(one.requests, 3 if place.dry else PROFILED_TOKENS, ignore_eos=True))


def _efficiency(
    bench: Bench, own: Sequence[RunFigures], full: Sequence[RunFigures], parts: Mapping[str, float] | None
) -> float | None:
    """Exit efficiency as `eeinfer bench` defines it, median over the rounds; None where no layer was skipped."""
    layers, share = bench.config.num_layers, layer_share(parts)
    found = [
        exit_efficiency(speed_up, layer_share=share, mean_layers=one.mean_layers, num_layers=layers)
        for one, other in zip(own, full, strict=True)
        if share is not None and one.mean_layers is not None and one.mean_layers < layers
        if (speed_up := _over(one, other)) is not None
    ]
    return median_of(found)[0] if found else None


def _over(own: RunFigures, full: RunFigures) -> float | None:
    ours, theirs = own.decode_tokens_per_second, full.decode_tokens_per_second
    return ours / theirs if ours and theirs else None


def _targets(bench: Bench, work: Work, entry: Entry) -> None:
    """What is aimed at, beside what came out."""

    def aim(what: str, value: float | None, bound: float, *, at_most: bool = False) -> None:
        if value is not None:
            bench.report.targets.append(Target(f"{bench.name}, {work}: {what}", value, bound, at_most))

    floor = entry["roofline"]["full"]
    aim("step of full over its floor", floor and floor["ratio"], 1.25, at_most=True)
    aim("host gap, share of a step of full", entry["device"]["full"]["host_share"], 0.05, at_most=True)
    if theirs := bench.baseline.get((work.batch, work.context)):
        aim("full over the baseline", entry["full"]["decode_tokens_per_second"][0] / theirs, 3.0)
    if "split at 0" in entry:
        aim("split where nobody leaves, over full", entry["split at 0"]["over_full"][0], 1.0)
    if (reached := entry["exit_efficiency"].get("split at 0.5")) is not None and floor:
        # Where weights are most of what is read, few layers fewer for half of the rows save little.
        best = floor["floor_seconds_per_iteration"] / entry["roofline"]["split at 0.5"]["floor_seconds_per_iteration"]
        allowed = reached / entry["split at 0.5"]["over_full"][0] * best
        aim(f"exit efficiency at a rate of 0.5 (memory allows {allowed:.2f})", reached, round(0.95 * allowed, 3))


def _ms(seconds: tuple[float, float, float]) -> str:
    middle, low, high = (1e3 * s for s in seconds)
    return f"{middle:.2f} ms a step ({low:.2f} to {high:.2f})"


def _shares(kinds: Mapping[str, float]) -> str:
    """The kinds of kernels that took most of the device's time."""
    return ", ".join(f"{kind} {share:.0%}" for kind, share in list(kinds.items())[:4])


def _times(floor: Mapping[str, Any] | None) -> str:
    return "unknown" if floor is None else f"{floor['ratio']:.2f}"
