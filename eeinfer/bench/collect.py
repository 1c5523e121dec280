"""From a suite that has run to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch

from eeinfer.bench import report
from eeinfer.bench.environment import environment
from eeinfer.bench.metrics import run_figures
from eeinfer.bench.subject import Subject
from eeinfer.bench.suite import Cell, Suite


def collect(suite: Suite, subject: Subject, *, command: Sequence[str], settings: Mapping[str, Any]) -> report.Report:
    """The report of `suite`.

    Args:
        suite: it has run, or was interrupted.
        subject: its model.
        command: the arguments of the process.
        settings: values by dotted key, without those that the sweep sets.
    """
    device = subject.model.decoder.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cells = [_cell(cell) for cells in suite.groups.values() for cell in cells]
    return report.to_report(
        environment=environment(threads=torch.get_num_threads(), device=str(device), device_name=name),
        command=command,
        settings=settings,
        model=asdict(subject.describe()),
        workload=asdict(_workload(suite)),
        cells=cells,
        interrupted=suite.interrupted,
        roofline=suite.roofline,
    )


def _cell(cell: Cell) -> report.CellEntry:
    figures = tuple(run_figures(run) for run in cell.runs)
    return report.CellEntry(cell.key, cell.warmup_seconds, figures, cell.breakdown, cell.quality, cell.roofline)


def _fingerprint(suite: Suite) -> str:
    """Of every request of every group: id, tokens and most new tokens."""
    digest = sha256()
    for requests in suite.requests.values():
        for request in requests:
            digest.update(repr((request.id, request.prompt_token_ids, request.sampling.max_tokens)).encode())
    return f"sha256:{digest.hexdigest()}"


def _workload(suite: Suite) -> report.Workload:
    options = suite.options
    runs = suite.requests.values()
    rates = options.simulated or {}
    return report.Workload(
        source=options.source,
        fingerprint=_fingerprint(suite),
        num_prompts=max(map(len, runs), default=0),
        prompt_tokens=max((sum(len(r.prompt_token_ids or ()) for r in requests) for requests in runs), default=0),
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        warmup=options.warmup,
        repeats=options.repeats,
        simulate_exits=",".join(f"{rate:g}@{layers}" for layers, rate in rates.items()) or None,
        trace=None if options.trace is None else options.trace.name,
    )
