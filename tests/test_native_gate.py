"""The native gate against its formula in float64, and the same bits whatever runs beside a row."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eeinfer.exits.gates import ODDS_EPS, GateSpec, plain_gate
from eeinfer.model.native import gate_of
from eeinfer.ops.native.kernels import NativeGate

EPS = 1e-5
SIZES = {"width": st.integers(1, 60).map(lambda n: 2 * n), "tokens": st.integers(1, 90), "pairs": st.integers(1, 60)}


def made(spec: GateSpec, hidden_size: int, draw: torch.Generator) -> dict[str, Tensor]:
    """A gate whose matrices are in bfloat16, as in files, and which is neither sure nor unsure throughout."""

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(shape, generator=draw)
        if len(shape) == 1:
            return drawn
        return (drawn * (3 if "shortlist" in name else 1) / shape[-1] ** 0.5).bfloat16()

    return {name: one(name, shape) for name, shape in spec.tensor_shapes(hidden_size).items()}


def in_float64(spec: GateSpec, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    return plain_gate(spec, {name: t.double() for name, t in tensors.items()}, EPS)(hidden.double())


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 40), seed=st.integers(0, 2**31), **SIZES)
def test_is_the_formulas(built: ctypes.CDLL, rows: int, width: int, tokens: int, pairs: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    spec = GateSpec(width, tokens)
    tensors = made(spec, 2 * pairs, draw)
    hidden = torch.randn(rows, 2 * pairs, generator=draw).bfloat16()
    found = NativeGate(built, tensors, EPS, ODDS_EPS)(hidden)
    assert found.dtype is torch.float32
    # What the second and third matrix multiply is rounded to 8 bits; the odds of a shortlist double small differences.
    torch.testing.assert_close(found.double(), in_float64(spec, tensors, hidden), rtol=0, atol=0.06)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 30), row=st.integers(0, 29), seed=st.integers(0, 2**31))
def test_a_row_does_not_depend_on_the_others(built: ctypes.CDLL, rows: int, row: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    gate = NativeGate(built, made(GateSpec(34, 50), 96, draw), EPS, ODDS_EPS)
    hidden, row = torch.randn(rows, 96, generator=draw).bfloat16(), row % rows
    assert torch.equal(gate(hidden)[row], gate(hidden[row : row + 1])[0])


def test_nan_stays_in_its_row(built: ctypes.CDLL) -> None:
    draw = torch.Generator().manual_seed(1)
    gate = NativeGate(built, made(GateSpec(34, 50), 96, draw), EPS, ODDS_EPS)
    hidden = torch.randn(3, 96, generator=draw).bfloat16()
    hidden[1, 5] = torch.nan
    assert gate(hidden).isnan().tolist() == [False, True, False]


def test_certainty_is_bounded(built: ctypes.CDLL) -> None:
    draw = torch.Generator().manual_seed(1)
    tensors = made(GateSpec(8, 1), 16, draw)  # one token on the shortlist has all the probability there is
    hidden = torch.randn(5, 16, generator=draw).bfloat16()
    found = NativeGate(built, tensors, EPS, ODDS_EPS)(hidden)
    assert torch.all((found >= 0) & (found <= 1))


def test_gates_that_it_does_not_know_stay_with_torch(built: ctypes.CDLL) -> None:
    for spec in (GateSpec(6), GateSpec(7, 20)):
        tensors = made(spec, 16, torch.Generator().manual_seed(2))
        hidden = torch.randn(4, 16).bfloat16()
        assert torch.equal(gate_of(built, spec, tensors, EPS)(hidden), plain_gate(spec, tensors, EPS)(hidden))
