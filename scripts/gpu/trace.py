"""What the device did during a run, from a profiler's trace: how long it rested, and which kernels took the time."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from gpu.place import Place
from torch.profiler import ProfilerActivity, profile

HOST_GAP = 5.0  # microseconds: a rest as long as this is the host's doing, a shorter one a launch within a graph
# First match wins, against the name of a kernel or of an operation.
KINDS = (
    ("copies", r"memcpy|memset|copy_"),
    ("attention", r"attend|merge_splits|attention|flash|fmha"),
    ("matrix products", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|addmm|linear|matmul|mm$"),
    ("rope and store", r"rotate|rope|store"),
    ("norms and activations", r"norm|gated|silu|gelu"),
    ("logits", r"part_stats|merge_parts|argmax|logsumexp|softmax|topk|reduce"),
)
_DEVICE, _HOST = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cpu_op"}


class Timeline(NamedTuple):
    """Of a profiled run, in seconds.

    Attributes:
        span: from the first device activity to the end of the last.
        busy: at least one was under way.
        host: in rests so long that the device waited for the host.
        kinds: seconds by kind of kernel, longest first.
        names: seconds and calls of the kernels that took longest.
    """

    span: float
    busy: float
    host: float
    kinds: dict[str, float]
    names: dict[str, tuple[float, int]]


def timeline(place: Place, run: Callable[[], object]) -> Timeline:
    """Profile `run`. In a dry run operations on the host stand for kernels."""
    activity = ProfilerActivity.CPU if place.dry else ProfilerActivity.CUDA
    place.synchronise()
    with profile(activities=[activity]) as profiler:
        run()
        place.synchronise()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return read_timeline(events, _HOST if place.dry else _DEVICE)


def read_timeline(events: list[dict[str, Any]], categories: set[str]) -> Timeline:
    """The timeline of a Chrome trace.

    Args:
        events: with `ts` and `dur` in microseconds.
        categories: that count.
    """
    found = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in categories and "dur" in e)
    busy = host = 0.0
    end = found[0][0] if found else 0.0
    kinds: dict[str, float] = defaultdict(float)
    names, calls = Counter[str](), Counter[str]()
    for start, duration, name in found:
        rest = start - end
        host += rest if rest >= HOST_GAP else 0.0
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        kinds[_kind(name)] += duration
        names[name[:80]] += duration
        calls[name[:80]] += 1
    span = end - found[0][0] if found else 0.0
    longest = sorted(kinds.items(), key=lambda item: -item[1])
    return Timeline(
        span / 1e6,
        busy / 1e6,
        host / 1e6,
        {kind: time / 1e6 for kind, time in longest},
        {name: (time / 1e6, calls[name]) for name, time in names.most_common(25)},
    )


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")
