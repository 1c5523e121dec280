"""Statistics of logits in one pass over the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eeinfer.ops.logit_stats import LogitStats

_PART = 2048  # logits


@triton.jit
def _part_stats(logits, numbers, indices, SIZE: tl.constexpr, PART: tl.constexpr, SECOND: tl.constexpr):
    """One part of one row: largest, second, sum of exp(x - largest), and that sum weighted by x - largest."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * SIZE + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=0)
    index = tl.min(tl.where(x == largest, at, SIZE - 1), axis=0)  # the first of equals; the last of all if all are NaN
    beside = tl.where(x == float("-inf"), 0.0, x - tl.where(largest == float("-inf"), 0.0, largest))
    exponential = tl.where(x == float("-inf"), 0.0, tl.exp(beside))
    target = row * tl.num_programs(1) + part
    tl.store(indices + target, index)
    tl.store(numbers + target * 4, largest)
    if SECOND:
        tl.store(numbers + target * 4 + 1, tl.max(tl.where(at == index, float("-inf"), x), axis=0))
    tl.store(numbers + target * 4 + 2, tl.sum(exponential, axis=0))
    tl.store(numbers + target * 4 + 3, tl.sum(exponential * beside, axis=0))


@triton.jit
def _merge_parts(
    numbers, indices, merged, argmax,
    SIZE: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, SECOND: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """The parts of one row: largest, second, log-sum-exp and mean."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    inside = part < PARTS
    source = row * PARTS + part
    own = tl.load(numbers + source * 4, mask=inside, other=float("-inf"))
    sums = tl.load(numbers + source * 4 + 2, mask=inside, other=0.0)
    weighted = tl.load(numbers + source * 4 + 3, mask=inside, other=0.0)
    index = tl.load(indices + source, mask=inside, other=SIZE - 1)
    largest = tl.max(own, axis=0)
    first = tl.min(tl.where(own == largest, index, SIZE - 1), axis=0)
    # A part of nothing but -inf has a sum of 0, and 0 times infinity would be NaN.
    beside = tl.where(own == float("-inf"), 0.0, own - largest)
    scale = tl.exp(beside)
    total = tl.sum(sums * scale, axis=0)
    nan = total != total  # noqa: PLR0124 - a logit was NaN: maxima pass over it, sums do not
    tl.store(argmax + row, first.to(tl.int64))
    tl.store(merged + row * 4, tl.where(nan, total, largest))
    second = float("-inf")
    if SECOND:
        runner_up = tl.load(numbers + source * 4 + 1, mask=inside, other=float("-inf"))
        second = tl.max(tl.where((own == largest) & (index == first), runner_up, own), axis=0)
        second = tl.where(nan, total, second)
    tl.store(merged + row * 4 + 1, second)
    tl.store(merged + row * 4 + 2, largest + tl.log(total))
    mean = float("nan")
    if MEAN:
        mean = largest + tl.sum(scale * (weighted + beside * sums), axis=0) / total
    tl.store(merged + row * 4 + 3, mean)


def logit_stats(logits: Tensor, *, second: bool, mean: bool) -> LogitStats:
    """As `eeinfer.ops.logit_stats.logit_stats`, in one pass; logits [n, V] in bfloat16, float16 or float32.

    A row is always cut into the same parts, which are merged in one order.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    parts = triton.cdiv(size, _PART)
    numbers = torch.empty(rows, parts, 4, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    merged = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    argmax = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _part_stats[(rows, parts)](logits, numbers, indices, SIZE=size, PART=_PART, SECOND=second, num_warps=4)
    _merge_parts[(rows,)](
        *(numbers, indices, merged, argmax),
        SIZE=size,
        PARTS=parts,
        PADDED=triton.next_power_of_2(parts),
        SECOND=second,
        MEAN=mean,
        num_warps=4,
    )
    largest, runner_up, log_sum_exp, average = merged.unbind(1)
    return LogitStats(largest, argmax, log_sum_exp, runner_up, average, size)
