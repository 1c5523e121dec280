"""One timed run: all requests queued, then the engine's steps, each with its clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from eeinfer.bench.record import Run
from eeinfer.core.request import Request, RequestOutput
from eeinfer.core.step import Step
from eeinfer.engine.engine import Engine
from eeinfer.errors import EeinferError, RequestError

_CLEAR_PEAK = "5"  # proc(5), clear_refs: resets the peak resident size


def measure(engine: Engine, requests: Sequence[Request], clock: Callable[[], float] = perf_counter) -> Run:
    """Answer all requests with a fresh engine and record every step.

    Args:
        engine: one that has done nothing yet; its clock is `clock`.
        requests: with token ids.
        clock: seconds.

    Raises:
        EeinferError: a request is refused.
    """
    device = engine.runner.decoder.device
    _reset_peak(device)
    for request in requests:
        try:
            engine.add(request)
        except RequestError as error:
            raise EeinferError(f"request {request.id} cannot be served: {error}") from None
    steps: list[Step] = []
    started = clock()
    while engine.has_work:
        steps.append(engine.step())
    stats = engine.stats
    return Run(
        started=started,
        steps=tuple(steps),
        outputs=_in_order(steps, requests),
        involuntary_exits=stats.involuntary_exits,
        involuntary_stays=stats.involuntary_stays,
        preemptions=stats.preemptions,
        peak_blocks=stats.peak_blocks,
        peak_memory=_peak(device),
    )


def _in_order(steps: Sequence[Step], requests: Sequence[Request]) -> tuple[RequestOutput, ...]:
    outputs = {output.id: output for step in steps for output in step.finished}
    return tuple(outputs[request.id] for request in requests)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")
    except OSError:
        return  # not Linux, or not allowed: the peak is then that of the whole process so far


def _peak(device: torch.device) -> int | None:
    """Bytes, of torch's allocator on CUDA, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        import psutil

        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", None)  # Windows has it; elsewhere nothing tells
    sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(sizes[0]) * 1024 if sizes else None
