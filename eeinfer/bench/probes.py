"""What this machine can do: read bandwidth and matrix rate, measured in this process with torch's current threads.

Every rate is the best of several rounds: a floor is built on what is possible, not on what is usual.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from eeinfer.errors import ConfigError
from eeinfer.model.families import ModelConfig
from eeinfer.runner.memory import free_memory

_CPUS = Path("/sys/devices/system/cpu")
_SMALLEST_BUFFER = 64 * 2**20
_BUFFERS = 4
_ROUNDS = 2  # at least; the first one also warms up

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of the matrix probes of one kind of device: rows, longest side of a model's matrix, and squares.

    `bursts`: times that the calls of a read probe are queued before the host waits for the device.
    """

    rows: int
    longest: int
    squares: tuple[int, ...]
    bursts: int


_SIZES = {"cpu": _Sizes(512, 4096, (1024, 2048), 1), "cuda": _Sizes(8192, 16384, (4096, 8192), 8)}


@dataclass(frozen=True, slots=True)
class Probes:
    """Rates by the name of the probe.

    Attributes:
        read: bytes a second, from memory.
        matrix: operations a second; a multiplication and an addition are two.
        llc_bytes: last-level cache; None where the system does not tell.
    """

    read: dict[str, float]
    matrix: dict[str, float]
    llc_bytes: int | None


@torch.inference_mode()
def probe(config: ModelConfig, dtype: torch.dtype, device: torch.device, seconds: float = 3.0) -> Probes:
    """Measure read bandwidth and matrix rate.

    Reads: plain sums, and products of few rows with wide weights as a decode step has them, from several buffers in
    turn, each larger than the last-level cache. On a CPU, with pages as they come and with huge pages.

    Args:
        config: of the model, whose matrices are among the shapes.
        dtype: of the model.
        device: of the model.
        seconds: to spend, about; a slow device takes longer.

    Raises:
        ConfigError: there is not enough free memory for the buffers.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps for later would count as taken
    llc_bytes = last_level_cache(device)
    size = max(_SMALLEST_BUFFER, 2 * (llc_bytes or 0))
    if (free := free_memory(device)) < 2 * _BUFFERS * size:
        raise ConfigError(
            f"--roofline needs {2 * _BUFFERS * size / 2**20:.0f} MiB to measure how fast memory is read, but "
            f"{free / 2**20:.0f} MiB are free on {device}: free some, or leave --roofline out"
        )
    return Probes(
        read=_read_rates(size, config.hidden_size, dtype, device, seconds / 2),
        matrix=_matrix_rates(config, dtype, device, seconds / 2),
        llc_bytes=llc_bytes,
    )


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the last-level cache, on a CPU of all of them that the process may use; None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches: dict[tuple[int, str], int] = {}
    for path in _CPUS.glob("cpu[0-9]*/cache/index*"):
        if int(path.parts[-3].removeprefix("cpu")) in _usable_cpus():
            level, shared, size = (_read(path / name) for name in ("level", "shared_cpu_list", "size"))
            if level.isdigit() and size.removesuffix("K").isdigit():
                caches[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last) or None


def _usable_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


# Reading


def _read_rates(size: int, columns: int, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, float]:
    kinds = ("", ", huge pages") if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE") else ("",)
    rates: dict[str, float] = {}
    for kind in kinds:
        reads = [_reads(_buffer(size, dtype, device, huge=bool(kind)), columns) for _ in range(_BUFFERS)]
        for name in reads[0]:
            calls = [calls_of[name] for calls_of in reads] * _SIZES[device.type].bursts
            rates[name + kind] = len(calls) * size / _best(calls, device, seconds / len(kinds) / len(reads[0]))
    return rates


def _buffer(size: int, dtype: torch.dtype, device: torch.device, *, huge: bool) -> Tensor:
    """`size` bytes that were written: pages that nobody has written are all the same page of zeros."""
    if device.type != "cpu":
        return torch.full((size // dtype.itemsize,), 0.5, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size)
    if huge:
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).fill_(0.5)


def _reads(buffer: Tensor, columns: int) -> dict[str, Call]:
    """Ways to read the buffer once: as numbers, and as the weights of a product with few rows."""
    weights = buffer[: len(buffer) // columns * columns].view(-1, columns)
    words = buffer.view(torch.float32)
    kind = _short(buffer.dtype)
    return {
        f"sum of {kind}": buffer.sum,
        "sum of float32": words.sum,
        "dot of float32": partial(torch.dot, *words.chunk(2)),
        f"{kind} weights by a vector": partial(torch.mv, weights, weights[0]),
        f"{kind} weights by 1 row": partial(F.linear, weights[:1], weights),
        f"{kind} weights by 4 rows": partial(F.linear, weights[:4], weights),
    }


# Products


def _matrix_rates(config: ModelConfig, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, float]:
    sizes, d, f = _SIZES[device.type], config.hidden_size, config.intermediate_size
    shapes = [(sizes.rows, 2 * f, d), (sizes.rows, d, f), *((side, side, side) for side in sizes.squares)]
    rates: dict[str, float] = {}
    for rows, out, inner in (tuple(min(side, sizes.longest) for side in shape) for shape in shapes):
        inputs, weights = (torch.empty(n, inner, dtype=dtype, device=device).normal_(std=0.02) for n in (rows, out))
        name = f"{_short(dtype)} {rows} x {inner} x {out}"
        took = _best([partial(F.linear, inputs, weights)], device, seconds / len(shapes))
        rates[name] = 2 * rows * inner * out / took
    return rates


# Both


def _best(calls: Sequence[Call], device: torch.device, budget: float) -> float:
    """Seconds that all calls in turn take at best, of as many rounds as the budget (in seconds) allows."""
    times: list[float] = []
    until = perf_counter() + budget
    while len(times) < _ROUNDS or perf_counter() < until:
        started = perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - started)
    return min(times)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
