"""`--exits auto`: which exits are proposed, and the costs that decide it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eeinfer import EeinferError
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.training.auto import candidates, measured_costs, select
from eeinfer.training.judge import Predictions
from eeinfer.training.selective import Costs


def costs(gate: float, head: float = 0.1) -> Costs:
    return Costs(10, vocabulary=2.0, completion=0.01, exits=(3, 6, 9), heads=(head,) * 3, gates=(gate,) * 3)


def predictions(*right: int) -> Predictions:
    """Of 1,000 tokens each exit is sure of so many, and right; of the others it is not, and wrong."""
    agree = torch.stack([torch.arange(1000) < n for n in right])
    return Predictions(torch.zeros_like(agree, dtype=torch.int64), agree, {"max-prob": 0.5 + 0.4 * agree.float()})


@pytest.mark.parametrize(("num_layers", "expected"), [(30, (7, 10, 13, 16, 20, 23, 26, 29)), (6, (1, 2, 3, 4, 5))])
def test_candidates_are_spread(num_layers: int, expected: tuple[int, ...]) -> None:
    assert candidates(num_layers) == expected


@pytest.mark.parametrize("num_layers", range(2, 50))
def test_candidates_lie_in_the_model(num_layers: int) -> None:
    found = candidates(num_layers)
    assert found == tuple(sorted(set(found)))
    assert 1 <= found[0] <= found[-1] < num_layers


def test_exits_that_save_are_taken_and_no_others() -> None:
    assert select(predictions(300, 700, 720), costs(gate=0.01), "gate") == (3, 6)
    assert select(predictions(0, 700, 720), costs(gate=0.01), "gate") == (6,)
    # A check as dear as the vocabulary product pays at the best exit alone.
    assert select(predictions(300, 700, 720), costs(gate=0.01), "max-prob") == (6,)


def test_it_is_said_when_nothing_pays() -> None:
    with pytest.raises(EeinferError, match="no exit pays"):
        select(predictions(300, 310, 320), costs(gate=3.0), "gate")
    with pytest.raises(EeinferError, match="none lets 50"):
        select(predictions(0, 10, 20), costs(gate=0.01), "gate")


def test_costs_are_measured_in_layers(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa", torch.float32)
    specs = [ExitSpec(2, "linear"), ExitSpec(4, "mlp", intermediate=48)]
    found = measured_costs(decoder, specs, torch.eye(32).repeat(2, 1, 1), gate=GateSpec(8, 20), rows=2)
    assert (found.num_layers, found.exits) == (6, (2, 4))
    assert all(0 < cost < 6 for cost in (found.vocabulary, found.completion, *found.heads, *found.gates))
    assert found.heads[0] < found.heads[1]
