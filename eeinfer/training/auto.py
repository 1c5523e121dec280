"""`--exits auto`: which exits would pay, from traced answers and from what this machine takes for each part of a step.

Nothing is trained yet, so each candidate is judged by its least-squares head, and its max-prob stands in for a gate.
Trained heads and gates are better at the same places, and take their own time; so this proposes, and promises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from eeinfer.errors import EeinferError
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.gates import GateSpec, gate_logit
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.training.judge import Predictions, predict
from eeinfer.training.least_squares import solve
from eeinfer.training.modules import TrainableHead, initial_tensors
from eeinfer.training.selective import Costs, joint
from eeinfer.training.states import pieces

_CANDIDATES = 8
_MOST = 4  # exits: each is a check for every token that passes it
_GAIN = 0.01  # of a full step, which one more exit must save
_CONTEXT = 256  # tokens before the timed one
_BLOCK = 16
_ROUNDS = 7


def candidates(num_layers: int) -> tuple[int, ...]:
    """Depths to look at: evenly spread from a quarter of the layers to the last but one."""
    first, last = max(1, num_layers // 4), num_layers - 1
    steps = max(1, min(_CANDIDATES, last - first + 1) - 1)
    return tuple(
        sorted({round(first + i * (last - first) / steps) for i in range(steps + 1)} & set(range(1, last + 1)))
    )


def propose(
    decoder: Decoder,
    states: dict[str, Tensor],
    specs: Sequence[ExitSpec],
    *,
    gate: GateSpec | None,
    rows: int,
    note: Callable[[str], None],
) -> tuple[int, ...]:
    """The exits that together save most per token.

    Args:
        decoder: the model.
        states: `train` and `dev`, [k + 1, n, d], at each candidate and at the end.
        specs: of the heads that would be trained there.
        gate: sizes of the gates; None: every check is a vocabulary product.
        rows: sequences of a step, for the timing.
        note: called with one-line notices.

    Raises:
        EeinferError: no exit would save anything.
    """
    eps = decoder.config.norm_eps
    maps, _ = solve((list(piece.to(decoder.device)) for piece in pieces(states["train"])), eps)
    linear = [ExitSpec(spec.layers_executed, "linear") for spec in specs]
    heads = HeadsFile(
        tuple(linear),
        tuple(initial_tensors(decoder, spec, a) for spec, a in zip(linear, maps, strict=True)),
    )
    costs = measured_costs(decoder, specs, maps, gate=gate, rows=rows)
    note(
        f"a layer at {rows} rows takes as long as {1 / costs.vocabulary:.2f} vocabulary products, "
        f"{1 / max(costs.completion, 1e-9):.1f} completions of a layer or {1 / max(*costs.heads, 1e-9):.1f} heads"
    )
    chosen = select(predict(decoder, heads, states["dev"]), costs, "gate" if gate else "max-prob")
    note(f"--exits auto: {','.join(map(str, chosen))}")
    return chosen


def select(found: Predictions, costs: Costs, measure: str) -> tuple[int, ...]:
    """Exits chosen one after the other, each the one that saves most beside those before, while that is worth it.

    Args:
        found: of the candidates; their max-prob is taken for the measure.
        costs: of the candidates.
        measure: what would be checked: `gate` or `max-prob`.

    Raises:
        EeinferError: not even the best exit saves anything.
    """
    sure = found.confidence["max-prob"]

    def saved(rows: Sequence[int]) -> float:
        own = replace(
            costs,
            exits=tuple(costs.exits[i] for i in rows),
            heads=tuple(costs.heads[i] for i in rows),
            gates=tuple(costs.gates[i] for i in rows),
        )
        turn = joint(measure, sure[list(rows)], found.agree[list(rows)], own)
        return turn.saved if all(turn.leaving) else -inf

    chosen: list[int] = []
    best, needed = 0.0, _GAIN * costs.full
    while len(chosen) < _MOST:
        tries = [sorted([*chosen, i]) for i in range(len(costs.exits)) if i not in chosen]
        gains = [(saved(rows), rows) for rows in tries]
        gain, rows = max(gains, default=(-inf, []))
        if gain < best + needed:
            break
        best, chosen = gain, rows
    if not chosen:
        what = "none lets 50 held-out tokens leave at 98 %" if gain == -inf else f"the best saves {gain:.2f}"
        raise EeinferError(
            f"--exits auto: no exit pays here: of {costs.full:.1f} layers a token, {what}; name --exits to tune heads "
            f"all the same, or give more prompts"
        )
    return tuple(costs.exits[i] for i in chosen)


@torch.inference_mode()
def measured_costs(
    decoder: Decoder, specs: Sequence[ExitSpec], maps: Tensor, *, gate: GateSpec | None, rows: int
) -> Costs:
    """What the parts of a decode step take on this machine, as shares of a layer's time.

    Args:
        decoder: the model.
        specs: of the heads.
        maps: [k, d, d], of their linear maps.
        gate: sizes of the gates; None: there are none.
        rows: sequences of the step.
    """
    config, device = decoder.config, decoder.device
    width = -(-(_CONTEXT + 1) // _BLOCK)
    cache = torch.zeros(
        (config.num_layers, 2, rows * width, _BLOCK, config.num_kv_heads, config.head_dim),
        dtype=decoder.dtype,
        device=device,
    )
    tables = torch.arange(rows * width, device=device).view(rows, width)
    batch = TokenBatch.decode(torch.full((rows,), _CONTEXT, device=device), tables, _BLOCK)
    hidden = torch.randn(rows, config.hidden_size, device=device, dtype=decoder.dtype)
    layer = _seconds(lambda: decoder.run(range(config.num_layers), hidden, batch, cache), device) / config.num_layers
    completion = _seconds(lambda: decoder.project_kv(0, hidden, batch.positions), device) / config.num_layers
    heads = [
        TrainableHead(spec, initial_tensors(decoder, spec, a), config.norm_eps).to(device, decoder.dtype)
        for spec, a in zip(specs, maps, strict=True)
    ]
    look = 0.0
    if gate:
        zeros = {n: torch.zeros(shape, device=device) for n, shape in gate.tensor_shapes(config.hidden_size).items()}
        logit = gate_logit(gate, zeros, config.norm_eps)
        look = _seconds(lambda: logit(hidden), device)
    return Costs(
        num_layers=config.num_layers,
        vocabulary=_seconds(lambda: decoder.vocabulary(hidden), device) / layer,
        completion=completion / layer,
        exits=tuple(spec.layers_executed for spec in specs),
        heads=tuple(_seconds(lambda head=head: head(hidden), device) / layer for head in heads),  # type: ignore[misc]
        gates=tuple(look / layer for _ in specs),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after one that warms up."""
    times = []
    for _ in range(_ROUNDS + 1):
        began = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - began)
    return median(times[1:])
