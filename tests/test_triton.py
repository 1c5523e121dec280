"""Triton kernels against torch, interpreted where there is no GPU: the same numbers, and bits that are a row's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eeinfer.ops.parts import TORCH, Parts
from eeinfer.ops.rope import rotary, rotations
from eeinfer.ops.token_batch import TokenBatch

pytest.importorskip("triton", reason="triton is not installed here; it is for Linux alone")

from eeinfer.model.triton import check_machine
from eeinfer.ops.triton.parts import paged_attention, triton_parts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where kernels are interpreted
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
few = settings(deadline=None, max_examples=6)


@pytest.fixture(scope="module")
def kernels() -> Parts:
    """The parts of a model with contexts up to 160."""
    check_machine(DEVICE)
    return triton_parts(160)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Shape:
    """Of attention, its cache and what is asked of it."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None
    softcap: float | None
    dtype: torch.dtype

    def run(self, attention: Any, q: Tensor, cache: Tensor, batch: TokenBatch, **options: int) -> Tensor:
        return attention(q, cache, batch.within(self.window), self.head_dim**-0.5, self.softcap, **options)

    def queries(self, count: int) -> Tensor:
        return normal(1, count, self.kv_heads * self.group, self.head_dim, dtype=self.dtype)

    def paged(self, contexts: list[int]) -> tuple[Tensor, Tensor]:
        """A cache with K and V of such contexts, NaN in all other slots, and the sequences' block tables."""
        width = -(-max(contexts) // self.block_size)
        order = torch.randperm(len(contexts) * width + 1, generator=torch.Generator().manual_seed(2))
        tables = order[:-1].view(len(contexts), width).to(DEVICE)
        sizes = (2, len(order), self.block_size, self.kv_heads, self.head_dim)
        cache, written = normal(3, *sizes, dtype=self.dtype), torch.zeros(sizes[1] * sizes[2], dtype=torch.bool)
        for table, context in zip(tables.cpu(), contexts, strict=True):
            slots = table[:, None] * self.block_size + torch.arange(self.block_size)
            written[slots.flatten()[:context]] = True
        cache.flatten(1, 2)[:, ~written.to(DEVICE)] = torch.nan
        return cache, tables


SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([12, 64, 80]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    window=st.sampled_from([None, 1, 7, 70]),
    softcap=st.sampled_from([None, 2.0]),
    dtype=DTYPES,
)


@few
@given(shape=SHAPES, contexts=st.lists(st.integers(1, 200), min_size=1, max_size=3))
def test_decode_attention(kernels: Parts, shape: Shape, contexts: list[int]) -> None:  # noqa: ARG001 - they are there
    cache, tables = shape.paged(contexts)
    positions = torch.tensor(contexts, device=DEVICE) - 1
    q, batch = shape.queries(len(contexts)), TokenBatch.decode(positions, tables, shape.block_size)
    found = shape.run(paged_attention, q, cache, batch, split=64)
    close(found, shape.run(TORCH.attention, q, cache.nan_to_num(0.0), batch))
    for row, context in enumerate(contexts):  # alone, with a table no wider than its own
        table = tables[row : row + 1, : -(-context // shape.block_size)]
        alone = TokenBatch.decode(positions[row : row + 1], table, shape.block_size)
        assert torch.equal(shape.run(paged_attention, q[row : row + 1], cache, alone, split=64)[0], found[row])


@few
@given(
    shape=SHAPES,
    positions=st.lists(st.sets(st.integers(0, 120), min_size=1, max_size=30).map(sorted), min_size=1, max_size=3),
    whole=st.integers(1, 70),
)
def test_prefill_attention(kernels: Parts, shape: Shape, positions: list[list[int]], whole: int) -> None:
    positions = [*positions, list(range(whole))]  # replays with gaps, after a prefix, and a whole prompt
    cache, tables = shape.paged([row[-1] + 1 for row in positions])
    q, batch = shape.queries(sum(map(len, positions))), TokenBatch.ragged(positions, tables, shape.block_size)
    found = shape.run(kernels.attention, q, cache, batch)
    close(found, shape.run(TORCH.attention, q, cache.nan_to_num(0.0), batch))
    start, stop = (batch.queries or ())[-1]
    alone = TokenBatch.ragged(positions[-1:], tables[-1:], shape.block_size)
    assert torch.equal(shape.run(kernels.attention, q[start:stop], cache, alone), found[start:stop])


def test_what_is_not_finite_stays_with_its_sequence(kernels: Parts) -> None:
    shape = Shape(1, 2, 64, 4, None, None, torch.float32)
    cache, tables = shape.paged([9, 9])
    clean = cache.clone()
    cache[1, tables[0, 1], 2] = torch.inf
    cache[0, tables[0, 1], 2] = torch.nan
    for batch in (
        TokenBatch.ragged([list(range(9)), list(range(9))], tables, 4),
        TokenBatch.decode(torch.tensor([8, 8], device=DEVICE), tables, 4),
    ):
        q = shape.queries(len(batch.positions))
        found = shape.run(kernels.attention, q, cache, batch)
        half = len(found) // 2
        assert found[half - 1].isnan().all(), "the last token sees it"
        assert torch.equal(found[half:], shape.run(kernels.attention, q, clean, batch)[half:])


def test_a_row_that_sees_nothing_gets_zeros(kernels: Parts) -> None:
    """As rows that only fill a captured batch may be."""
    shape = Shape(1, 2, 64, 4, None, None, torch.float32)
    cache, tables = shape.paged([9, 9])
    batch = TokenBatch.decode(torch.tensor([8, 0], device=DEVICE), tables, 4)
    batch = replace(batch, positions=torch.tensor([8, -1], device=DEVICE))
    for split in (64, 4096):
        found = shape.run(paged_attention, shape.queries(2), cache, batch, split=split)
        assert found[0].all()
        assert not found[1].any()
    assert kernels.attention is not TORCH.attention


@few
@given(
    heads=st.sampled_from([(4, 2), (3, 1), (16, 4)]),
    head_dim=st.sampled_from([12, 64, 80]),
    turned=st.sampled_from([0.0, 0.5, 1.0]),
    norm=st.sampled_from(["none", "head", "whole"]),
    dtype=DTYPES,
)
def test_rotate_and_store(
    kernels: Parts, heads: tuple[int, int], head_dim: int, turned: float, norm: str, dtype: torch.dtype
) -> None:
    q_heads, kv_heads = heads
    projected = normal(1, 3, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.tensor([0, 7, 40], device=DEVICE)
    rotation = None
    if turned:
        of = rotary(int(head_dim * turned), 100.0, {"rope_type": "default"})
        rotation = rotations(positions, of._replace(frequencies=of.frequencies.to(DEVICE)), dtype)
    sizes = {"head": (head_dim, head_dim), "whole": (q_heads * head_dim, kv_heads * head_dim)}.get(norm)
    gains = None if sizes is None else (normal(2, sizes[0], dtype=dtype), normal(3, sizes[1], dtype=dtype))
    cache = normal(4, 2, 3, 4, kv_heads, head_dim, dtype=dtype)
    slots = torch.tensor([5, 11, 0], device=DEVICE)
    expected_cache, found_cache = cache.clone(), cache.clone()
    expected = TORCH.rotate_and_store(projected, expected_cache, slots, rotation, gains, 1e-5)
    close(kernels.rotate_and_store(projected, found_cache, slots, rotation, gains, 1e-5), expected)
    close(found_cache, expected_cache)
    untouched = cache.clone()
    close(kernels.rotate_and_store(projected, untouched, slots.new_full((3,), -1), rotation, gains, 1e-5), expected)
    assert torch.equal(untouched, cache), "a slot of -1 stores nothing"


@pytest.mark.parametrize("copies", [False, True])
def test_layers_are_stored_in_one_launch(kernels: Parts, *, copies: bool) -> None:
    cache = normal(1, 3, 2, 4, 4, 2, 12)
    both = normal(2, 3, 5, 2 * 2 * 12)
    k, v = (x.unflatten(-1, (2, 12)) for x in both.chunk(2, dim=-1))
    if copies:  # the same in all layers
        k, v = (x[:1].expand(3, -1, -1, -1) for x in (k, v))
    slots = torch.tensor([5, 11, -1, 0, 7], device=DEVICE)
    expected, kept = cache.clone(), slots >= 0
    TORCH.store_layers(expected, k[:, kept], v[:, kept], slots[kept])
    kernels.store_layers(cache, k, v, slots)
    assert torch.equal(cache, expected)


@few
@given(size=st.integers(1, 200), wide_gain=st.booleans(), dtype=DTYPES)
def test_norms(kernels: Parts, size: int, dtype: torch.dtype, *, wide_gain: bool) -> None:
    x, delta = normal(1, 3, size, dtype=dtype), normal(2, 3, size, dtype=dtype)
    gain = normal(3, size, dtype=torch.float32 if wide_gain else dtype)
    for own in (gain, None):
        close(kernels.rms_norm(x, own, 1e-5), TORCH.rms_norm(x, own, 1e-5))
    found, expected = (parts.add_rms_norm(x, delta, gain, 1e-5) for parts in (kernels, TORCH))
    close(found[0], expected[0])
    close(found[1], expected[1])
    close(kernels.rms_norm(x[None], gain, 1e-5)[0], TORCH.rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations(kernels: Parts, activation: str, dtype: torch.dtype) -> None:
    x = normal(1, 2, 2 * 1100, dtype=dtype) * 3
    x[1, 5] = torch.nan
    found, expected = kernels.gated(x, activation), TORCH.gated(x, activation)
    assert found[1, 5].isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    close(found.nan_to_num(), expected.nan_to_num())


@few
@given(size=st.integers(2, 5000), spread=st.floats(0, 30), dtype=DTYPES, seed=st.integers(0, 2**31))
def test_statistics_of_logits(kernels: Parts, size: int, spread: float, dtype: torch.dtype, seed: int) -> None:
    logits = (normal(seed, 2, size) * spread).round().to(dtype)  # rounded: many are equal
    logits[0, size // 2] = -torch.inf
    found, expected = (parts.logit_stats(logits, second=True, mean=True) for parts in (kernels, TORCH))
    assert torch.equal(found.argmax, expected.argmax)
    alone = kernels.logit_stats(logits[1:], second=True, mean=True)
    for name in ("largest", "second", "log_sum_exp", "mean"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-4)
        assert torch.equal(getattr(alone, name)[0], getattr(found, name)[1])
    bare = kernels.logit_stats(logits, second=False, mean=False)
    assert torch.equal(bare.log_sum_exp, found.log_sum_exp)
    assert bare.second.tolist() == [-torch.inf] * 2
    assert bare.mean.isnan().all()


def test_logits_that_are_not_finite_show(kernels: Parts) -> None:
    logits = normal(1, 3, 4500)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    found = kernels.logit_stats(logits, second=True, mean=True)
    for values in (found.largest, found.second, found.log_sum_exp, found.mean):
        assert values.isnan().tolist()[:2] == [False, True]
    assert found.largest[2] == found.log_sum_exp[2] == -torch.inf
    assert found.argmax[2] == 0
    logits[1] = torch.nan
    assert 0 <= int(kernels.logit_stats(logits, second=False, mean=False).argmax[1]) < 4500


def test_steps_do_not_make_new_kernels(kernels: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a constant for the compiler depends on the model alone, not on contexts, widths, windows or rows."""
    seen: list[dict[str, Any]] = []
    shape = Shape(1, 2, 64, 4, None, None, torch.float32)
    cache, tables = shape.paged([60, 60, 60])

    class Recorder:
        def __getitem__(self, _: Any) -> Callable[..., None]:
            return lambda *_, **constants: seen.append(constants)

    for name in ("decode_attention._attend_split", "decode_attention._merge_splits", "prefill_attention._attend_tile"):
        monkeypatch.setattr(f"eeinfer.ops.triton.{name}", Recorder())
    for rows, width in ((1, 8), (2, 12), (3, 15)):
        batch = TokenBatch.decode(torch.full((rows,), 2 * width, device=DEVICE), tables[:rows, :width], 4)
        paged_attention(shape.queries(rows), cache, batch.within(width), 1.0, split=16)
        ragged = TokenBatch.ragged([range(width)] * rows, tables[:rows, :width], 4)
        kernels.attention(shape.queries(rows * width), cache, ragged.within(width), 1.0)
    assert len(seen) == 9
    assert seen[:3] == seen[3:6] == seen[6:]
