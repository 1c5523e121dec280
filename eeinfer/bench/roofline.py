"""Roofline: the least time that the passes of a run could have taken on this machine, beside what they took.

The floor of a pass is the bytes that it must read over the best read rate, or its operations over the best matrix rate,
whichever is longer (Williams et al., 2009, doi 10.1145/1498765.1498785). A best rate is the best that any probe or any
pass of the benchmark reached, so a ratio of measured time over floor cannot be under 1 unless something here is wrong.

Counted are weights, the KV that attention reads, and the vocabulary matrix at each use. Not counted is what is small
beside them (activations, the arithmetic of norms, an exit head's own map), nor completion: a floor stays one without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from eeinfer.bench.probes import Probes
from eeinfer.bench.record import Run
from eeinfer.core.step import Step
from eeinfer.exits.measures import LOGIT_MEASURES
from eeinfer.model.families import ModelConfig
from eeinfer.model.weights import empty_weights, layer_views

_ROUNDING = 1e-9


class Work(NamedTuple):
    """What a step must do at least: bytes to read, and operations (a multiplication and an addition are two)."""

    read_bytes: int
    operations: int


class WorkCounter:
    """Counts the work of steps.

    Args:
        config: of the model.
        dtype: of weights and cache.
        stage_layers: layers of each stage; the last stage ends at the model's own head.
        measure: of the exits, a name of `eeinfer.config.schema.Measure`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, stage_layers: Sequence[int], measure: str) -> None:
        layer = layer_views(empty_weights(config, dtype, torch.device("meta")), config.num_layers)[0]
        tensors = [tensor for tensor in layer if tensor is not None]
        self._stage_layers = tuple(stage_layers)
        self._checks_logits = measure in LOGIT_MEASURES
        self._layer_bytes = sum(tensor.nbytes for tensor in tensors)
        self._layer_parameters = sum(tensor.numel() for tensor in tensors if tensor.dim() > 1)  # of the matrices
        self._kv_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize  # of a token in a layer
        self._attention_operations = 4 * config.num_heads * config.head_dim  # scores and sums, for a token of context
        self._vocabulary_parameters = config.vocab_size * config.hidden_size
        self._vocabulary_bytes = self._vocabulary_parameters * dtype.itemsize

    def of_pass(self, step: Step) -> Work:
        """Work of one stage on its rows."""
        layers = self._stage_layers[step.stage]
        to_vocabulary = self._rows_to_vocabulary(step)
        return Work(
            layers * (self._layer_bytes + step.context * self._kv_bytes) + bool(to_vocabulary) * self._vocabulary_bytes,
            layers * (2 * self._layer_parameters * step.rows + self._attention_operations * step.context)
            + 2 * self._vocabulary_parameters * to_vocabulary,
        )

    def prefill_operations(self, steps: Iterable[Step]) -> int:
        """Operations of prefills at full depth, without those of attention, for which steps do not hold the lengths."""
        return sum(
            2 * sum(self._stage_layers) * self._layer_parameters * step.rows
            + 2 * self._vocabulary_parameters * len(step.produced)
            for step in steps
        )

    def _rows_to_vocabulary(self, step: Step) -> int:
        """Rows that need logits: all at the end and where the measure looks at them, else those that leave."""
        last = step.stage == len(self._stage_layers) - 1
        return step.rows if last or self._checks_logits else len(step.produced)


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of one cell, and what counts their work. `label` names the cell to people."""

    label: str
    work: WorkCounter
    runs: Sequence[Run]

    def passes(self) -> Iterator[tuple[Step, Work]]:
        """Every pass of every run, with its work."""
        return ((step, self.work.of_pass(step)) for run in self.runs for step in run.steps if step.kind == "pass")

    def prefill_rate(self) -> float:
        """Operations a second of the best run's prefills; 0 where none counts.

        All of a run's prefills are taken together, because on CUDA one that picks no token ends before its work does.
        Replay runs fewer layers than its tokens tell, so runs with preemptions do not count.
        """
        runs = [[s for s in run.steps if s.kind == "prefill"] for run in self.runs if not run.preemptions]
        return max((self.work.prefill_operations(p) / sum(s.seconds for s in p) for p in runs if p), default=0.0)


class Best(NamedTuple):
    """The best rate seen, a second, and who reached it."""

    rate: float
    by: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Best rates of a benchmark: bytes read and operations, a second."""

    read: Best
    matrix: Best

    def floor(self, work: Work) -> tuple[float, float]:
        """Seconds that the reading and the operations take at least."""
        return work.read_bytes / self.read.rate, work.operations / self.matrix.rate


def best_rates(probes: Probes, cells: Sequence[Measured]) -> Rates:
    """The best rates that a probe or a step of the benchmark reached."""
    read = [Best(rate, name) for name, rate in probes.read.items()]
    matrix = [Best(rate, name) for name, rate in probes.matrix.items()]
    for cell in cells:
        for step, work in cell.passes():
            read.append(Best(work.read_bytes / step.seconds, f"a pass of {cell.label}"))
            matrix.append(Best(work.operations / step.seconds, f"a pass of {cell.label}"))
        matrix.append(Best(cell.prefill_rate(), f"the prefills of {cell.label}"))
    return Rates(max(read), max(matrix))


def rates_entry(probes: Probes, rates: Rates) -> dict[str, Any]:
    """The entry `roofline` of a report: all probes, and the best rates with their origin."""
    return {
        "llc_bytes": probes.llc_bytes,
        "read": {"best": rates.read.rate, "by": rates.read.by, "probes": probes.read},
        "matrix": {"best": rates.matrix.rate, "by": rates.matrix.by, "probes": probes.matrix},
    }


def cell_entry(rates: Rates, cell: Measured) -> dict[str, Any] | None:
    """The entry `roofline` of a cell, over all its repeats; None when nothing was decoded.

    Measured is the time of passes and completions. `bound` is what the longer part of the floor waits for.
    """
    floors = [(step, *rates.floor(work)) for step, work in cell.passes()]
    if not floors:
        return None
    iterations = sum(step.stage == 0 for step, _, _ in floors)
    floor = sum(max(reading, computing) for _, reading, computing in floors)
    reading_bound = sum(reading for _, reading, computing in floors if reading >= computing)
    measured = sum(step.seconds for run in cell.runs for step in run.steps if step.kind != "prefill")
    entry: dict[str, Any] = {
        "floor_seconds_per_iteration": floor / iterations,
        "measured_seconds_per_iteration": measured / iterations,
        "ratio": measured / floor,
        "bound": "read" if 2 * reading_bound >= floor else "matrix",
    }
    if measured < floor * (1 - _ROUNDING):
        entry["bug"] = "the ratio is under 1: a rate or a count of the roofline is wrong, so do not trust this floor"
    return entry
