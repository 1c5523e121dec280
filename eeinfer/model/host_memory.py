"""Memory for weights on the host."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_HUGE = 2**21  # bytes of a huge page; less than some of them are not worth a mapping of their own


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`, but in huge pages where the system gives them to those who ask.

    A decode step reads all weights once. In small pages the processor then also looks up tens of thousands of places.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
