"""The seam between decode steps and a device: how a step is captured, and how its inputs and its verdict travel.

Two sides of it: CUDA graphs, and a dry run that calls each step where a graph would be replayed. All that decides what
a step does lies on this side of the seam, so that it runs, and is tested, on any machine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Step = Callable[[], None]


class Capture(Protocol):
    """What decode steps ask of a device."""

    def capture(self, step: Step) -> Step:
        """Run `step` once, to warm up, and return what does the same again: it reads and writes the same tensors."""

    def upload(self, values: Sequence[int], target: Tensor) -> Tensor:
        """Copy `values` to the beginning of `target` (int64 [m]) and return that part of it; the host does not wait."""

    def download(self, source: Tensor) -> list[float]:
        """The values of `source` (float64 [m]), once all that was asked of the device before is done."""


class CudaCapture:
    """Steps as CUDA graphs, all in one memory pool.

    The memory of a graph's intermediate results is free for the next one to be captured: graphs run one at a time, and
    what outlives a step lies in tensors from outside. Captured largest first, all fit where the largest did.

    Args:
        device: of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for warming up and for all captures: libraries keep their handles by stream, and a pool is shared
        # only between captures on one stream.
        self._stream = torch.cuda.Stream(device)
        self._told = torch.cuda.Event()
        self._landing = torch.empty(0, dtype=torch.float64)

    def capture(self, step: Step) -> Step:
        """See Capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What a collection frees may call the driver, and few calls are allowed while it captures.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def upload(self, values: Sequence[int], target: Tensor) -> Tensor:
        """See Capture. Pinned memory is handed out again only when the copy from it is done."""
        filled = target[: len(values)]
        filled.copy_(torch.tensor(values, dtype=target.dtype, pin_memory=True), non_blocking=True)
        return filled

    def download(self, source: Tensor) -> list[float]:
        """See Capture."""
        if len(self._landing) < len(source):
            self._landing = torch.empty(len(source), dtype=source.dtype, pin_memory=True)
        landed = self._landing[: len(source)]
        landed.copy_(source, non_blocking=True)
        self._told.record()
        self._told.synchronize()
        return landed.tolist()


class DryCapture:
    """Steps that are called again in place of being replayed: the dry run."""

    def capture(self, step: Step) -> Step:
        """See Capture."""
        step()
        return step

    def upload(self, values: Sequence[int], target: Tensor) -> Tensor:
        """See Capture."""
        filled = target[: len(values)]
        filled.copy_(torch.tensor(values, dtype=target.dtype))
        return filled

    def download(self, source: Tensor) -> list[float]:
        """See Capture."""
        return source.tolist()
