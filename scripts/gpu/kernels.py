"""Each kernel against its reference in float64, over a table of shapes, and whether a row depends on its companions."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from itertools import accumulate
from multiprocessing import get_context
from typing import NamedTuple

import torch
from gpu.place import TOLERANCE, Place, Random, normal, row_error
from gpu.report import Cell, Entry, WrongResultError
from gpu.shapes import CONTEXTS, DRY_CONTEXTS, DRY_SHAPES, DTYPES, FP32, SHAPES, Shape, name_of
from torch import Tensor

from eeinfer.model.triton import check_machine
from eeinfer.ops.parts import TORCH, Parts
from eeinfer.ops.rope import rotary, rotations
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.triton.parts import triton_parts

JUNK = 300.0  # in slots that no query may see: were it read, nothing would come out right


class Task(NamedTuple):
    """One check of one row of a table: of SHAPES, or of DTYPES where only rows matter."""

    kind: str
    row: int


class Outcome(NamedTuple):
    """What became of a task: the error, or in words what is wrong, or how it broke."""

    what: str
    error: float = 0.0
    wrong: str | None = None
    broke: str | None = None


class Checks:
    """All tasks, in several processes.

    Nearly all of the time goes to compilers. And an illegal access spoils the device for its process from then on, and
    that must not be the one which runs the other cells.

    Args:
        place: the device.
        jobs: processes; 1 stays in this one.
    """

    def __init__(self, place: Place, jobs: int) -> None:
        self._place = place
        self._jobs = jobs
        self._outcomes: dict[Task, Outcome] | None = None

    def of(self, kind: str) -> Entry:
        """The outcomes of one kind.

        Raises:
            WrongResultError: one of them is wrong.
            RuntimeError: one of them broke.
        """
        if self._outcomes is None:
            self._outcomes = self._run()
        found = [outcome for task, outcome in self._outcomes.items() if task.kind == kind]
        wrong = [one.wrong for one in found if one.wrong is not None]
        broke = [f"{one.what}: {one.broke}" for one in found if one.broke is not None]
        if wrong or broke:  # all that is known of all kinds, as the run may end here
            for task, one in self._outcomes.items():
                print(
                    f"kernels: {task.kind}, {one.what}: {one.wrong or one.broke or f'{one.error:.1e}'}", file=sys.stderr
                )
        if wrong:
            raise WrongResultError(wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""))
        if broke:
            raise RuntimeError(f"{len(broke)} of {len(found)} broke; {broke[0].rstrip().rpartition(chr(10))[2]}")
        worst = max(found, key=lambda one: one.error)
        errors = {one.what: one.error for one in found}
        return {"errors": errors, "line": f"{len(found)} of the table, off by at most {worst.error:.1e} ({worst.what})"}

    def _run(self) -> dict[Task, Outcome]:
        shapes = DRY_SHAPES if self._place.dry else SHAPES
        tasks = [Task("rows", row) for row in range(len(DTYPES))]
        tasks += [Task(kind, row) for row in range(len(shapes)) for kind in _BY_SHAPE]
        if self._jobs == 1:
            return {task: outcome_of(task, self._place) for task in tasks}
        # Spawned, as CUDA does not live through a fork.
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            waiting = {task: pool.submit(outcome_of, task, self._place) for task in tasks}
            return {task: _result(task, future) for task, future in waiting.items()}


def _result(task: Task, future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenExecutor as error:  # its process died
        return Outcome(f"{task.kind} {task.row}", broke=str(error))


def cells(place: Place, jobs: int) -> Iterator[Cell]:
    """The cells. The first waits for the compilers."""
    checks = Checks(place, jobs)
    for kind, seconds in (("rows", 90), *((kind, 1) for kind in _BY_SHAPE)):
        yield Cell(f"kernels: {kind}", seconds, lambda kind=kind: checks.of(kind))


def outcome_of(task: Task, place: Place) -> Outcome:
    """Do one task."""
    shape = (DRY_SHAPES if place.dry else SHAPES)[task.row] if task.kind in _BY_SHAPE else None
    what = name_of(DTYPES[task.row]) if shape is None else str(shape)
    try:
        check_machine(place.device)
        if shape is None:
            return Outcome(what, _rows(place, DTYPES[task.row]))
        return Outcome(what, _BY_SHAPE[task.kind](place, triton_parts(shape.max_position), shape, task.row))
    except WrongResultError as wrong:
        return Outcome(what, wrong=str(wrong))
    except Exception:  # noqa: BLE001 - told with the others
        return Outcome(what, broke=traceback.format_exc())


def _within(error: float, dtype: torch.dtype, what: str) -> float:
    if not error <= TOLERANCE[dtype]:
        raise WrongResultError(f"{what}: a row is off by {error:.2e} of its length, {TOLERANCE[dtype]:g} is allowed")
    return error


def _same(one: Tensor, other: Tensor, what: str) -> None:
    if not torch.equal(one, other):
        differ = int((one != other).sum())
        raise WrongResultError(f"{what}: {differ} of {one.numel()} numbers differ, and none may")


# Norms, activations, logits


def _rows(place: Place, dtype: torch.dtype) -> float:
    """Kernels that work on rows: sizes that are no powers of two, rows alone as in company."""
    parts, draw, rows = triton_parts(4096), normal(place, 0), 3 if place.dry else 17
    worst = 0.0
    for size in (64, 96) if place.dry else (512, 576, 896, 1024, 4096, 5120, 14336):
        worst = max(worst, _norms(draw, parts, rows, size, dtype), _activations(draw, parts, rows, size, dtype))
    for vocabulary in (200, 3000) if place.dry else (4096, 49152, 128256, 151936):
        worst = max(worst, _logits(draw, parts, rows, vocabulary, dtype))
    return worst


def _norms(draw: Random, parts: Parts, rows: int, size: int, dtype: torch.dtype) -> float:
    hidden, delta = draw(rows, size, dtype=dtype), draw(rows, size, dtype=dtype)
    gain, what = draw(size, dtype=dtype), f"{name_of(dtype)} rows of {size}"
    out = parts.rms_norm(hidden, gain, 1e-5)
    error = _within(row_error(out, TORCH.rms_norm(hidden.double(), gain.double(), 1e-5)), dtype, f"rms_norm, {what}")
    _same(out[1:2], parts.rms_norm(hidden[1:2], gain, 1e-5), f"rms_norm, {what}, a row alone and in company")
    total, normed = parts.add_rms_norm(hidden, delta, gain, 1e-5)
    error = max(error, _within(row_error(total, hidden.double() + delta.double()), dtype, f"add_rms_norm, {what}, sum"))
    expected = TORCH.rms_norm(total.double(), gain.double(), 1e-5)
    return max(error, _within(row_error(normed, expected), dtype, f"add_rms_norm, {what}"))


def _activations(draw: Random, parts: Parts, rows: int, size: int, dtype: torch.dtype) -> float:
    gate_up = draw(rows, 2 * size, dtype=dtype)
    errors = []
    for name in ("silu", "gelu_pytorch_tanh"):
        what = f"{name}, {name_of(dtype)} rows of {size}"
        out = parts.gated(gate_up, name)
        errors.append(_within(row_error(out, TORCH.gated(gate_up.double(), name)), dtype, what))
        _same(out[1:2], parts.gated(gate_up[1:2], name), f"{what}, a row alone and in company")
    return max(errors)


def _logits(draw: Random, parts: Parts, rows: int, vocabulary: int, dtype: torch.dtype) -> float:
    """Statistics of logits: ties, impossible tokens, rows that hold a NaN."""
    logits = 4 * draw(rows, vocabulary, dtype=dtype)
    logits[0, 5] = logits[0, vocabulary - 1] = 60.0  # the first of equals wins
    logits[1, ::2] = -torch.inf
    what = f"logit_stats, {name_of(dtype)}, vocabulary {vocabulary}"
    stats = parts.logit_stats(logits, second=True, mean=True)
    expected = TORCH.logit_stats(logits.double(), second=True, mean=True)
    _same(stats.argmax, expected.argmax, f"{what}, argmax")
    _same(stats.largest.double(), expected.largest, f"{what}, largest")
    _same(stats.second.double(), expected.second, f"{what}, second")
    error = 0.0
    for name in ("log_sum_exp", "mean"):
        # Statistics are float32 whatever the logits are.
        one = row_error(getattr(stats, name)[:, None], getattr(expected, name)[:, None])
        error = max(error, _within(one, FP32, f"{what}, {name}"))
    alone = parts.logit_stats(logits[2:3], second=True, mean=True)
    _same(alone.log_sum_exp, stats.log_sum_exp[2:3], f"{what}, a row alone and in company")
    logits[2, 7] = torch.nan
    spoilt = parts.logit_stats(logits, second=True, mean=True)
    if not bool(spoilt.log_sum_exp[2].isnan()) or bool(spoilt.log_sum_exp[:2].isnan().any()):
        raise WrongResultError(f"{what}: a NaN must spoil the log-sum-exp of its own row, and no other")
    return error


# What attention reads and writes


class Paged(NamedTuple):
    """A cache of one layer, and sequences in it whose blocks lie scattered.

    `clean` is zero wherever no key is; `cache` has JUNK there, but in the null block.
    """

    cache: Tensor
    clean: Tensor
    tables: Tensor


def _paged(draw: Random, shape: Shape, contexts: tuple[int, ...], device: torch.device) -> Paged:
    size = shape.block_size
    needed = [-(-context // size) for context in contexts]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1)).tolist()
    starts = [0, *accumulate(needed)]
    own = [order[start : start + count] for start, count in zip(starts, needed, strict=False)]
    null = blocks - 1
    tables = torch.tensor([table + [null] * (max(needed) - len(table)) for table in own], device=device)
    drawn = draw(2, blocks, size, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
    clean, cache = torch.zeros_like(drawn), torch.full_like(drawn, JUNK)
    cache[:, null] = 0
    for table, context in zip(own, contexts, strict=True):
        for i, block in enumerate(table):
            keys = min(size, context - i * size)
            clean[:, block, :keys] = cache[:, block, :keys] = drawn[:, block, :keys]
    return Paged(cache, clean, tables)


def _decode(place: Place, parts: Parts, shape: Shape, seed: int) -> float:
    draw, contexts = normal(place, seed), DRY_CONTEXTS if place.dry else CONTEXTS
    paged = _paged(draw, shape, contexts, place.device)
    positions = torch.tensor(contexts, device=place.device) - 1
    q = draw(len(contexts), shape.heads, shape.head_dim, dtype=shape.dtype)
    scale = shape.head_dim**-0.5

    def attend(rows: list[int], width: int) -> Tensor:
        tables = paged.tables[rows]
        tables = torch.nn.functional.pad(tables, (0, max(0, width - tables.shape[1])), value=len(paged.cache[0]) - 1)
        batch = TokenBatch.decode(positions[rows], tables[:, :width], shape.block_size).within(shape.window)
        return parts.attention(q[rows], paged.cache, batch, scale, shape.softcap)

    every, widest = list(range(len(contexts))), paged.tables.shape[1]
    out = attend(every, widest)
    batch = TokenBatch.decode(positions, paged.tables, shape.block_size).within(shape.window)
    expected = TORCH.attention(q.double(), paged.clean.double(), batch, scale, shape.softcap)
    error = _within(row_error(out, expected), shape.dtype, f"decode attention, {shape}")
    for row in every[:: 3 if place.dry else 2]:
        narrow = -(-contexts[row] // shape.block_size)
        for width in (narrow, 2 * widest):
            what = f"decode attention, {shape}, context {contexts[row]} alone with a table of {width} and in company"
            _same(attend([row], width)[0], out[row], what)
    return error


def _prefill(place: Place, parts: Parts, shape: Shape, seed: int) -> float:
    """A whole prompt, the rest of one, a token, a chunk, and a replay that jumps: ragged, as the engine runs them."""
    draw = normal(place, seed + 100)
    n = 20 if place.dry else 700
    spans = [range(n), range(n // 2 + 3, n), range(17, 18), range(n // 3), [*range(0, n // 2, 3), n - 1]]
    paged = _paged(draw, shape, tuple(span[-1] + 1 for span in spans), place.device)
    counts = [len(span) for span in spans]
    q = draw(sum(counts), shape.heads, shape.head_dim, dtype=shape.dtype)
    scale = shape.head_dim**-0.5
    batch = TokenBatch.ragged(spans, paged.tables, shape.block_size).within(shape.window)
    out = parts.attention(q, paged.cache, batch, scale, shape.softcap)
    expected = TORCH.attention(q.double(), paged.clean.double(), batch, scale, shape.softcap)
    error = _within(row_error(out, expected), shape.dtype, f"prefill attention, {shape}")
    start = counts[0]
    alone = TokenBatch.ragged(spans[1:2], paged.tables[1:2], shape.block_size).within(shape.window)
    own = slice(start, start + counts[1])
    what = f"prefill attention, {shape}, a sequence alone and in company"
    _same(parts.attention(q[own], paged.cache, alone, scale, shape.softcap), out[own], what)
    return error


def _stores(place: Place, parts: Parts, shape: Shape, seed: int) -> float:
    """Norm of q and k, rotation, and the stores: of a layer, and of the layers that completion fills."""
    draw, rows = normal(place, seed + 200), 5 if place.dry else 37
    size, kv, head_dim, dtype = shape.block_size, shape.kv_heads, shape.head_dim, shape.dtype
    blocks = -(-rows // size) + 2
    order = torch.randperm(blocks * size, generator=torch.Generator().manual_seed(seed))[:rows]
    slots = order.to(place.device)
    slots[0] = -1  # a row that is stored nowhere
    turn = rotary(shape.rotary_dim or head_dim, 1e4, {"rope_type": "default"})
    turn = turn._replace(frequencies=turn.frequencies.to(place.device))
    cos, sin = rotations(torch.arange(rows, device=place.device) * 31 + 2, turn, dtype)
    gains = (draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype)) if shape.qk_norm else None
    projected = draw(rows, (shape.heads + 2 * kv) * head_dim, dtype=dtype)
    cache = draw(2, blocks, size, kv, head_dim, dtype=dtype)
    expected_cache = cache.double()
    q = parts.rotate_and_store(projected, cache, slots, (cos, sin), gains, 1e-6)
    wide = None if gains is None else (gains[0].double(), gains[1].double())

    def reference(first: int, target: Tensor) -> Tensor:
        rotation = cos[first:].double(), sin[first:].double()
        where = slots[first:].clamp_min(0)
        return TORCH.rotate_and_store(projected[first:].double(), target, where, rotation, wide, 1e-6)

    what = f"rotate_and_store, {shape}"
    error = _within(row_error(q, reference(0, expected_cache.clone())), dtype, f"{what}, q")
    reference(1, expected_cache)
    error = max(error, _within(row_error(cache, expected_cache), dtype, f"{what}, the cache"))
    layers = 3
    k, v = (draw(layers, rows, kv, head_dim, dtype=dtype) for _ in range(2))
    stack = draw(layers, 2, blocks, size, kv, head_dim, dtype=dtype)
    expected = stack.clone()
    parts.store_layers(stack, k, v, slots)
    TORCH.store_layers(expected, k[:, 1:], v[:, 1:], slots[1:])
    _same(stack, expected, f"store_layers, {shape}")
    return error


_BY_SHAPE: dict[str, Callable[[Place, Parts, Shape, int], float]] = {
    "rope and store": _stores,
    "decode": _decode,
    "prefill": _prefill,
}
