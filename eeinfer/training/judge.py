"""What heads and gates are worth on answers that they were not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from eeinfer.engine.build import head_on
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.heads import ExitHead, ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import at_least_float32
from eeinfer.training.selective import Costs, Joint, auroc, coverage, joint
from eeinfer.training.states import pieces

PRECISIONS = (0.95, 0.98, 0.99)  # of coverage
TEMPERATURES = (0.25, 4.0)
_ROWS = 512  # logits at a time


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What k exits say of n tokens.

    Attributes:
        tokens: [k, n] int64, the head's.
        agree: [k, n] bool, whether that is the model's.
        confidence: [k, n] by measure: `max-prob`, and `gate` where all exits have one.
    """

    tokens: Tensor
    agree: Tensor
    confidence: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MeasureFigures:
    """How well one measure sorts the tokens of one exit: AUROC, and coverage at each of `PRECISIONS`."""

    auroc: float | None
    coverage: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExitFigures:
    """One exit: share of tokens where its token is the model's, and figures by measure."""

    layers_executed: int
    agreement: float
    measures: dict[str, MeasureFigures]


@dataclass(frozen=True, slots=True)
class Judged:
    """All exits on one set of answers, and what they save in turn, by measure."""

    tokens: int
    exits: tuple[ExitFigures, ...]
    joint: dict[str, Joint]

    @property
    def measure(self) -> str:
        """The measure to serve with: gates where there are some."""
        return "gate" if "gate" in self.joint else "max-prob"

    def to_json(self) -> dict[str, Any]:
        """A plain dict; thresholds of inf as text."""
        return _rounded(asdict(self))


@torch.inference_mode()
def predict(decoder: Decoder, heads: HeadsFile, states: Tensor) -> Predictions:
    """Run all heads, and their gates, as they are served.

    Args:
        decoder: the model.
        heads: of k exits.
        states: [k + 1, n, d], at each exit and at the end.
    """
    ready = [head_on(decoder, spec, own) for spec, own in zip(heads.specs, heads.tensors, strict=True)]
    with_gates = all(head.gate is not None for head in ready)
    tokens, agree, sure, gated = [], [], [], []
    for piece in pieces(states, _ROWS):
        *exits, final = piece.to(decoder.device)
        target = decoder.logits(final).argmax(dim=-1)
        said = [_max_prob(head, state) for head, state in zip(ready, exits, strict=True)]
        tokens.append(torch.stack([token for token, _ in said]).cpu())
        agree.append(torch.stack([token == target for token, _ in said]).cpu())
        sure.append(torch.stack([probability for _, probability in said]).cpu())
        if with_gates:
            gated.append(torch.stack([_gate(head, state) for head, state in zip(ready, exits, strict=True)]).cpu())
    confidence = {"max-prob": torch.cat(sure, dim=1)}
    if with_gates:
        confidence["gate"] = torch.cat(gated, dim=1)
    return Predictions(torch.cat(tokens, dim=1), torch.cat(agree, dim=1), confidence)


def _max_prob(head: ExitHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden)
    probability, token = logits.to(at_least_float32(logits.dtype)).softmax(dim=-1).max(dim=-1)
    return token, probability


def _gate(head: ExitHead, hidden: Tensor) -> Tensor:
    assert head.gate is not None
    return head.gate(hidden)


def figures(found: Predictions, costs: Costs, thresholds: Mapping[str, Sequence[float]] | None = None) -> Judged:
    """The figures of one set of answers.

    Args:
        found: by `predict`.
        costs: of the model and these heads.
        thresholds: one per exit by measure, chosen elsewhere; by default they are chosen here.
    """
    exits = []
    for i, depth in enumerate(costs.exits):
        agree = found.agree[i]
        measures = {
            name: MeasureFigures(auroc(c[i], agree), tuple(coverage(c[i], agree, p) for p in PRECISIONS))
            for name, c in found.confidence.items()
        }
        exits.append(ExitFigures(depth, float(agree.double().mean()), measures))
    in_turn = {
        name: joint(name, c, found.agree, costs, None if thresholds is None else thresholds[name])
        for name, c in found.confidence.items()
    }
    return Judged(found.agree.shape[1], tuple(exits), in_turn)


def costs_of(decoder: Decoder, heads: HeadsFile) -> Costs:
    """What exits cost in this model, from the sizes of its tensors."""
    w, config = decoder.weights, decoder.config
    layer = sum(stack[0].numel() for stack in (w.qkv, w.output, w.gate_up, w.down))
    gates = [sum(t.numel() for name, t in own.items() if name.startswith("gate.")) for own in heads.tensors]
    sizes = [sum(t.numel() for t in own.values()) for own in heads.tensors]
    return Costs(
        num_layers=decoder.num_layers,
        vocabulary=w.lm_head.numel() / layer,
        completion=2 * config.num_kv_heads * config.head_dim * config.hidden_size / layer,
        exits=tuple(spec.layers_executed for spec in heads.specs),
        heads=tuple((size - gate) / layer for size, gate in zip(sizes, gates, strict=True)),
        gates=tuple(gate / layer for gate in gates),
    )


@torch.inference_mode()
def fit_temperature(decoder: Decoder, spec: ExitSpec, tensors: dict[str, Tensor], states: Tensor) -> float:
    """The temperature at which the head gives the model's tokens the highest likelihood, within `TEMPERATURES`.

    Args:
        decoder: the model.
        spec: of the head, at temperature 1.
        tensors: of the head.
        states: [2, n, d], at the exit and at the end.
    """
    head = head_on(decoder, spec, tensors)

    def loss(log_temperature: float) -> float:
        total = 0.0
        for piece in pieces(states, _ROWS):
            hidden, final = piece.to(decoder.device)
            logits = head.logits(hidden)
            logs = (logits.to(at_least_float32(logits.dtype)) / exp(log_temperature)).log_softmax(dim=-1)
            total -= float(logs.gather(1, decoder.logits(final).argmax(dim=-1, keepdim=True)).sum())
        return total / states.shape[1]

    bounds = (log(TEMPERATURES[0]), log(TEMPERATURES[1]))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 5e-3})
    return round(exp(float(found.x)), 4)


def _rounded(value: Any) -> Any:
    """Floats to six digits, infinite ones as text, through dicts and lists."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if abs(value) < float("inf") else str(value)
    return value
