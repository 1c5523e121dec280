"""When decode steps are captured, and how that is told."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from eeinfer.config.schema import ModelSettings
from eeinfer.model.decoder import Decoder
from eeinfer.runner.capture import Capture, CudaCapture
from eeinfer.runner.graphs import DecodeGraphs
from eeinfer.runner.memory import free_memory


def device_capture(settings: ModelSettings, decoder: Decoder) -> Capture | None:
    """What captures decode steps: CUDA graphs, where attention stops at the end of each row's context.

    Attention in plain torch reads block tables to their end, and a captured step has tables of a fixed width.
    """
    if settings.enforce_eager or decoder.device.type != "cuda" or decoder.reads_whole_tables:
        return None
    return CudaCapture(decoder.device)


def prepare(graphs: DecodeGraphs, device: torch.device, note: Callable[[str], None]) -> None:
    """Capture what is captured before the first request, and tell."""
    note("capturing CUDA graphs of decode steps")
    free, started = free_memory(device), perf_counter()
    count = graphs.prepare()
    taken = max(0, free - free_memory(device))
    note(f"captured {count} CUDA graphs in {perf_counter() - started:.1f} s, {taken / 2**20:.0f} MiB")
