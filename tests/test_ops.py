"""Ops against independent formulas: loops for attention, complex numbers for RoPE."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from eeinfer.core.plan import Draw, Row
from eeinfer.ops.attention import paged_attention, store_kv
from eeinfer.ops.norm import at_least_float32, rms_norm
from eeinfer.ops.rope import Rotary, inverse_frequencies, rotary, rotate, rotations
from eeinfer.ops.token_batch import TokenBatch, slot_of
from eeinfer.runner.row_pool import CacheShape, RowPool

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LONGROPE = {
    "short_factor": [1 + i / 20 for i in range(32)],
    "long_factor": [1 + i / 5 for i in range(32)],
    "factor": 8.0,
    "original_max_position_embeddings": 4096,
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


# Norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = normal(5, 7, dtype=dtype) * 3, normal(7, seed=1, dtype=dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype is dtype
    wide = x.double()
    plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    tolerance = 2 * torch.finfo(dtype).eps
    same(out.double(), plain * weight.double(), tolerance)
    same(rms_norm(x, None, 1e-5).double(), plain, tolerance)


def test_rms_norm_where_squares_overflow_or_vanish() -> None:
    large = torch.full((1, 4), 30000.0, dtype=torch.float16)  # its square is inf in float16
    assert rms_norm(large, None, 1e-6).tolist() == [[1.0] * 4]
    assert rms_norm(torch.zeros(1, 4), None, 1e-6).tolist() == [[0.0] * 4]
    # eps is inside the root: x = 1e-3 with eps 1e-6 gives 1 / sqrt(2).
    x = torch.full((1, 2), 1e-3, dtype=torch.float64)
    same(rms_norm(x, None, 1e-6), torch.full_like(x, 0.5).sqrt())


def test_at_least_float32() -> None:
    found = [at_least_float32(d) for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
    assert found == [torch.float32, torch.float32, torch.float32, torch.float64]


# RoPE


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10_000.0), (10, 10_000.0), (128, 500_000.0)])
def test_inverse_frequencies(head_dim: int, theta: float) -> None:
    exact = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    torch.testing.assert_close(inverse_frequencies(head_dim, theta), exact, rtol=1e-6, atol=0)


def test_rotate_is_complex_multiplication() -> None:
    x, positions = normal(6, 3, 10), torch.tensor([0, 1, 5, 77, 1000, 8191])
    frequencies = inverse_frequencies(10, 10_000.0)
    turning = Rotary(frequencies, 1.0)
    out = rotate(x, rotations(positions, turning, torch.float64))
    pairs = torch.complex(x[..., :5], x[..., 5:])
    angles = positions[:, None].double() * frequencies.double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    same(out, torch.cat((turned.real, turned.imag), dim=-1))
    same(out[0], x[0])  # position 0 is not turned
    same(out.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_distance_only() -> None:
    q, k = normal(1, 1, 8), normal(1, 1, 8, seed=1)
    turning = Rotary(inverse_frequencies(8, 500.0), 1.0)

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, rotations(torch.tensor([at]), turning, torch.float64)) for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-9)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_rotation_is_computed_wide_and_returned_narrow() -> None:
    cos, sin = rotations(torch.tensor([4001]), Rotary(inverse_frequencies(4, 10_000.0), 1.0), torch.bfloat16)
    assert cos.dtype is sin.dtype is torch.float32
    assert cos.shape == (1, 1, 2)
    same(cos.double()[0, 0], torch.tensor([math.cos(4001), math.cos(40.01)]).double(), 1e-5)
    x = normal(1, 2, 4, dtype=torch.bfloat16)
    out = rotate(x, (cos, sin))
    assert out.dtype is torch.bfloat16
    same(out, rotate(x.float(), (cos, sin)).bfloat16())


def scaled_by(kind: str, **values: float) -> Tensor:
    return rotary(64, 500_000.0, {"rope_type": kind, **values}).frequencies


def test_scaling_of_each_kind() -> None:
    plain = inverse_frequencies(64, 500_000.0)
    same(scaled_by("default"), plain)
    same(scaled_by("linear", factor=4.0), plain / 4)
    scaled = scaled_by("llama3", **LLAMA3)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any()
    assert long.any()
    assert not (short | long).all()
    same(scaled[short], plain[short])
    same(scaled[long], plain[long] / 8)
    between = scaled[~(short | long)] / plain[~(short | long)]
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (between.diff() < 0).all()


YARN = {"factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "truncate": True}


@pytest.mark.parametrize(
    ("kind", "scaling", "extra"),
    [
        ("default", {}, {}),
        ("linear", {"factor": 2.5}, {}),
        ("dynamic", {"factor": 2.5}, {}),
        ("llama3", LLAMA3, {}),
        ("yarn", YARN, {"attention_factor": 0.1 * math.log(8) + 1}),
        ("yarn", YARN | {"truncate": False, "beta_fast": 20}, {"attention_factor": 0.1 * math.log(8) + 1}),
        ("yarn", YARN | {"attention_factor": 1.5}, {}),
        ("longrope", LONGROPE, {"attention_factor": math.sqrt(1 + math.log(8) / math.log(4096))}),
    ],
)
def test_rotary_equals_that_of_transformers(kind: str, scaling: dict[str, Any], extra: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind, "rope_theta": 50_000.0, **scaling}
    keys: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 32768}
    keys |= {"rope_theta": 50_000.0, "rope_scaling": dict(rope)}  # spelled so that releases 4 and 5 take it
    theirs = LlamaRotaryEmbedding(LlamaConfig(**keys))
    ours = rotary(64, 50_000.0, rope | extra)
    same(ours.frequencies, theirs.inv_freq, 1e-6)
    assert ours.factor == pytest.approx(theirs.attention_scaling, rel=1e-9)


# Token batches


def test_slots() -> None:
    tables = torch.tensor([[7, 2, 9], [1, 0, 0]])
    assert slot_of(tables, torch.tensor([35, 0]), 16).tolist() == [147, 16]
    assert slot_of(tables, torch.tensor([2, 0]), 1).tolist() == [9, 1]
    assert slot_of(tables, torch.tensor([15, 15]), 16).tolist() == [127, 31]
    assert slot_of(tables, torch.tensor([16, 15]), 16).tolist() == [32, 31]


@pytest.mark.parametrize("window", [1, 3, 5, 100])
def test_a_window_narrows_every_mask(window: int) -> None:
    tables = torch.tensor([[3, 0, 6], [1, 4, 7], [2, 5, 8]])
    decode = TokenBatch.decode(torch.tensor([2, 5, 9]), tables, 4)
    positions = [[0, 1, 2, 3], [5, 6], [1, 4, 8]]  # a whole prompt, a chunk, and a replay with gaps
    ragged = TokenBatch.ragged(positions, tables, 4)
    assert decode.within(None) is decode
    (mask,) = decode.within(window).masks
    assert mask is not None
    for row, position in zip(mask[:, 0, 0].tolist(), [2, 5, 9], strict=True):
        assert [i for i, seen in enumerate(row) if seen] == list(range(max(0, position - window + 1), position + 1))
    for queries, mask in zip(positions, ragged.within(window).masks, strict=True):
        if mask is None:
            assert len(queries) <= window
            continue
        for position, row in zip(queries, mask.tolist(), strict=True):
            assert [i for i, seen in enumerate(row) if seen] == list(range(max(0, position - window + 1), position + 1))


def test_decode_batch() -> None:
    batch = TokenBatch.decode(torch.tensor([2, 5]), torch.tensor([[3, 0], [1, 4]]), 4)
    assert batch.slots.tolist() == [14, 17]
    assert batch.queries is None
    (mask,) = batch.masks
    assert mask is not None
    assert mask.shape == (2, 1, 1, 8)
    assert mask[:, 0, 0].tolist() == [[True] * 3 + [False] * 5, [True] * 6 + [False] * 2]


def test_rows_of_unequal_length_never_read_blocks_of_others() -> None:
    """Padding is masked, but a weight of 0 times the NaN of a failing companion is NaN."""

    def row(request_id: str, slot: int, position: int, block_table: tuple[int, ...]) -> Row:
        return Row(request_id, slot, 5, position, block_table, Draw(), number=1, max_tokens=9)

    for rows in (
        (row("a", 2, 6, (4, 7)), row("b", 0, 1, (0,)), row("c", 1, 2, (3,))),
        (row("a", 2, 0, (1,)), row("b", 0, 8, (0, 2, 6))),
    ):
        tables = RowPool(CacheShape(8, 4, 3), torch.device("cpu")).begin(rows).block_tables.tolist()
        for row, table in zip(rows, tables, strict=True):
            assert tuple(table[: len(row.block_table)]) == row.block_table
            others = {block for other in rows if other is not row for block in other.block_table}
            assert not others & set(table)


def rows_of(*slots: int) -> tuple[Row, ...]:
    """A row a slot; that of slot s is at position s and has s + 1 blocks, of one token each."""
    return tuple(Row(str(s), s, 5, s, tuple(range(10 * s, 11 * s + 1)), Draw(), number=1, max_tokens=9) for s in slots)


def test_rows_that_go_on_together_find_their_tensors_as_they_are() -> None:
    pool = RowPool(CacheShape(50, 1, 5), torch.device("cpu"))
    rows, hidden = rows_of(3, 0, 2), normal(3, 4)
    batch = pool.begin(rows)
    pool.keep(rows, hidden, batch)
    found, same = pool.take(rows)
    assert found is hidden
    assert same is batch


@pytest.mark.parametrize("asked", [(0, 2), (2, 3, 0), (3,)])
def test_rows_that_part_are_gathered(asked: tuple[int, ...]) -> None:
    pool = RowPool(CacheShape(50, 1, 5), torch.device("cpu"))
    rows, hidden = rows_of(3, 0, 2), normal(3, 4)
    pool.keep(rows, hidden, pool.begin(rows))
    found, batch = pool.take(rows_of(*asked))
    assert torch.equal(found, hidden[[[3, 0, 2].index(slot) for slot in asked]])
    expected = pool.begin(rows_of(*asked))
    for name in ("positions", "slots", "block_tables"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))


def test_rows_of_several_passes_meet() -> None:
    pool = RowPool(CacheShape(50, 1, 5), torch.device("cpu"))
    first, second = normal(3, 4), normal(1, 4)
    pool.keep(rows_of(3, 0, 2), first, pool.begin(rows_of(3, 0, 2)))
    pool.keep(rows_of(0), second, pool.begin(rows_of(0)))
    found, batch = pool.take(rows_of(2, 0))
    assert torch.equal(found, torch.stack([first[2], second[0]]))
    assert batch.positions.tolist() == [2, 0]


def test_ragged_batch() -> None:
    tables = torch.tensor([[3, 0], [1, 4], [2, 5]])
    batch = TokenBatch.ragged([[0, 1, 2], [5], [1, 4]], tables, 4)
    assert batch.positions.tolist() == [0, 1, 2, 5, 1, 4]
    assert batch.slots.tolist() == [12, 13, 14, 17, 9, 20]
    assert batch.queries == ((0, 3), (3, 4), (4, 6))
    whole, later, gaps = batch.masks
    assert whole is None
    assert later is not None
    assert later.tolist() == [[True] * 6]
    assert gaps is not None
    assert gaps.tolist() == [[True, True, False, False, False], [True] * 5]


# Attention


def test_store_kv_writes_its_slots_only() -> None:
    cache = normal(2, 3, 4, 2, 5)
    before, k, v = cache.clone(), normal(2, 2, 5, seed=1), normal(2, 2, 5, seed=2)
    store_kv(cache, k, v, torch.tensor([9, 2]))
    flat, old = cache.view(2, 12, 2, 5), before.view(2, 12, 2, 5)
    same(flat[0, [9, 2]], k)
    same(flat[1, [9, 2]], v)
    rest = [i for i in range(12) if i not in {9, 2}]
    assert torch.equal(flat[:, rest], old[:, rest])


class Paged:
    """Contexts of several sequences scattered over shuffled blocks, with junk everywhere else."""

    def __init__(self, lengths: list[int], block_size: int, heads: int, kv_heads: int, *, junk: float = 50.0) -> None:
        self.block_size, self.heads, self.kv_heads, self.head_dim = block_size, heads, kv_heads, 6
        self.keys = [normal(n, kv_heads, 6, seed=10 + i) for i, n in enumerate(lengths)]
        self.values = [normal(n, kv_heads, 6, seed=90 + i) for i, n in enumerate(lengths)]
        counts = [-(-n // block_size) + i % 2 for i, n in enumerate(lengths)]  # some tables are longer than needed
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in counts]
        self.padding = order.pop()
        self.cache = normal(2, sum(counts) + 2, block_size, kv_heads, 6, seed=3) * junk
        for k, v, table in zip(self.keys, self.values, self.tables, strict=True):
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(len(k))])
            store_kv(self.cache, k, v, slots)

    def table(self, sequences: list[int]) -> Tensor:
        width = max(len(self.tables[i]) for i in sequences)
        return torch.tensor([self.tables[i] + [self.padding] * (width - len(self.tables[i])) for i in sequences])

    def naive(
        self, q: Tensor, sequence: int, position: int, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """One query [heads, head_dim], head by head, key by key."""
        out, first = [], max(0, position + 1 - (window or position + 1))
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = [float(q[head] @ self.keys[sequence][p, kv]) * 0.4 for p in range(first, position + 1)]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = special.softmax(np.array(scores))
            out += [sum(w * self.values[sequence][p, kv] for p, w in enumerate(weights, start=first))]
        return torch.cat(out)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_decode_attention(block_size: int, heads: int, kv_heads: int) -> None:
    lengths = [1, 4, 9, 16, 5]
    paged = Paged(lengths, block_size, heads, kv_heads)
    rows = [3, 0, 4, 2]
    positions = [lengths[i] - 1 for i in rows]
    q = normal(len(rows), heads, 6, seed=7)
    batch = TokenBatch.decode(torch.tensor(positions), paged.table(rows), block_size)
    out = paged_attention(q, paged.cache, batch, 0.4)
    assert out.shape == (4, heads * 6)
    for row, (i, p) in enumerate(zip(rows, positions, strict=True)):
        same(out[row], paged.naive(q[row], i, p))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_ragged_attention(block_size: int, heads: int, kv_heads: int) -> None:
    paged = Paged([5, 9, 7, 6], block_size, heads, kv_heads)
    # A whole prompt, a chunk in the middle, one token, and a replay whose shallow tokens have stopped already.
    positions = [list(range(5)), [3, 4, 5, 6, 7, 8], [6], [0, 2, 3, 5]]
    q = normal(sum(map(len, positions)), heads, 6, seed=8)
    batch = TokenBatch.ragged(positions, paged.table([0, 1, 2, 3]), block_size)
    out = paged_attention(q, paged.cache, batch, 0.4)
    flat = [(i, p) for i, row in enumerate(positions) for p in row]
    for row, (i, p) in enumerate(flat):
        same(out[row], paged.naive(q[row], i, p))


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_with_a_window_and_capped_scores(window: int | None, softcap: float | None) -> None:
    paged = Paged([5, 9, 7, 6], 4, 6, 2)
    positions = [list(range(5)), [3, 4, 5, 6, 7, 8], [6], [0, 2, 3, 5]]
    q = normal(sum(map(len, positions)), 6, 6, seed=8)
    ragged = TokenBatch.ragged(positions, paged.table([0, 1, 2, 3]), 4).within(window)
    out = paged_attention(q, paged.cache, ragged, 0.4, softcap)
    for row, (i, p) in enumerate((i, p) for i, own in enumerate(positions) for p in own):
        same(out[row], paged.naive(q[row], i, p, window, softcap))
    decode = TokenBatch.decode(torch.tensor([4, 8, 6, 5]), paged.table([0, 1, 2, 3]), 4).within(window)
    out = paged_attention(q[:4], paged.cache, decode, 0.4, softcap)
    for i, p in enumerate([4, 8, 6, 5]):
        same(out[i], paged.naive(q[i], i, p, window, softcap))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_unread_slots_do_not_matter(dtype: torch.dtype) -> None:
    outs = []
    for junk in (0.0, 1e4):
        paged = Paged([3, 7], 4, 6, 2, junk=junk)
        q, cache = normal(2, 6, 6, seed=9, dtype=dtype), paged.cache.to(dtype)
        decode = TokenBatch.decode(torch.tensor([2, 6]), paged.table([0, 1]), 4)
        ragged = TokenBatch.ragged([[2], [6]], paged.table([0, 1]), 4)
        outs.append(torch.stack([paged_attention(q, cache, batch, 0.4) for batch in (decode, ragged)]))
    assert torch.equal(outs[0], outs[1])


def test_later_positions_are_not_seen() -> None:
    paged = Paged([9], 4, 2, 1)
    q = normal(1, 2, 6, seed=9)
    batch = TokenBatch.decode(torch.tensor([5]), paged.table([0]), 4)
    same(paged_attention(q, paged.cache, batch, 0.4)[0], paged.naive(q[0], 0, 5))
