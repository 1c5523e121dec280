"""Gates: trained after the heads to tell from the hidden state whether the head's token will be the model's.

The teacher is the head itself. How often it is right at a given max-prob is learned on answers that the heads have not
seen (on those that they have, heads are right more often). A gate learns to give that function of max-prob, on answers
of both kinds: a probability says more than a yes or no, and as a function of the hidden state it holds wherever that
state comes from. On unseen answers part of the target is whether the head was right.

A gate starts as the head seen through a shortlist: reduced-rank regression of the head's logits for the tokens that it
says most often (Izenman 1975, doi 10.1016/0047-259X(75)90042-1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn import functional as F

from eeinfer.engine.build import head_on
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import at_least_float32, rms_norm
from eeinfer.training.distill import rate, spread
from eeinfer.training.judge import predict
from eeinfer.training.modules import TrainableGate

EPOCHS = 6
LR = 1e-3
WEIGHT_DECAY = 0.01
BATCH = 256  # tokens
MOST = 2**16  # tokens of either kind
TRUTH = 0.3  # share of the truth in the targets of unseen answers; the teacher has the rest
SUREST = 0.999  # and 1 - that: the range of targets
ODDS = 0.7  # initial weight of the shortlist's log-odds
_FITTED = 2**14  # tokens that the initial tensors are fitted to
_RIDGE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What one gate learns from.

    Attributes:
        hidden: [n, d] states at the exit, on the CPU.
        target: [n] probabilities that the head's token is the model's.
        tokens: [n] the head's tokens.
    """

    hidden: Tensor
    target: Tensor
    tokens: Tensor


def with_gates(decoder: Decoder, heads: HeadsFile, states: dict[str, Tensor], sizes: GateSpec, seed: int) -> HeadsFile:
    """The heads, each with a gate.

    Args:
        decoder: the model.
        heads: of k exits, without gates.
        states: `gate` and `train`, unseen by the heads and seen, [k + 1, n, d]: at each exit and at the end.
        sizes: of the gates, with a shortlist.
        seed: of the initial values and of the order.
    """
    stored = torch.promote_types(decoder.dtype, torch.bfloat16)
    tensors = []
    for i, lesson in enumerate(lessons(decoder, heads, states)):
        start = initial_gate(decoder, heads.specs[i], heads.tensors[i], sizes, lesson, seed + i)
        gate = train_gate(sizes, start, lesson, decoder.config.norm_eps, seed + i)
        # Matrices are nearly all of a gate's size; the few other numbers keep their precision.
        tensors.append({name: t.to(stored) if len(t) > 1 < t.dim() else t for name, t in gate.items()})
    return HeadsFile(
        tuple(replace(spec, gate=sizes) for spec in heads.specs),
        tuple(own | gate for own, gate in zip(heads.tensors, tensors, strict=True)),
    )


def lessons(decoder: Decoder, heads: HeadsFile, states: dict[str, Tensor]) -> Iterator[Lesson]:
    """What the gate of each exit learns from; arguments as for `with_gates`."""
    unseen, seen = spread(states["gate"], MOST), spread(states["train"], MOST)
    fresh, known = predict(decoder, heads, unseen), predict(decoder, heads, seen)
    for i in range(len(heads.specs)):
        agree, sure, others = (x[i] for x in (fresh.agree, fresh.confidence["max-prob"], known.confidence["max-prob"]))
        taught = calibrated(sure, agree, torch.cat((sure, others)))
        truth = taught[: len(agree)] + TRUTH * (agree.double() - taught[: len(agree)])
        target = torch.cat((truth, taught[len(agree) :]))
        hidden = torch.cat((unseen[i], seen[i]))
        yield Lesson(hidden, target, torch.cat((fresh.tokens[i], known.tokens[i])))


def calibrated(sure: Tensor, agree: Tensor, others: Tensor) -> Tensor:
    """How often a head is right at other values of max-prob: an isotonic regression, linear between its points.

    Args:
        sure: [n] max-prob.
        agree: [n] bool, whether the head's token is the model's.
        others: [m] max-prob.

    Returns:
        [m] float64, kept off 0 and 1.
    """
    order = sure.argsort()
    rising = isotonic_regression(agree[order].double().numpy()).x
    found = np.interp(others.double().numpy(), sure[order].double().numpy(), rising)
    return torch.from_numpy(found).clamp(1 - SUREST, SUREST)


@torch.no_grad()
def initial_gate(
    decoder: Decoder, spec: ExitSpec, head: dict[str, Tensor], sizes: GateSpec, lesson: Lesson, seed: int
) -> dict[str, Tensor]:
    """Tensors of a gate that takes the shortlist's max-prob for its answer, float32 or wider, on the CPU.

    Args:
        decoder: the model.
        spec: of the exit's head.
        head: its tensors.
        sizes: of the gate, with a shortlist.
        lesson: states and tokens at this exit.
        seed: of the classifier, for which there is nothing to copy.
    """
    assert sizes.tokens is not None, "gates are trained with a shortlist"
    counts = torch.bincount(lesson.tokens, minlength=decoder.config.vocab_size)
    rows = decoder.weights.lm_head[counts.topk(sizes.tokens).indices.to(decoder.device)].double().cpu()
    few = lesson.hidden[:: -(-len(lesson.hidden) // _FITTED)]
    x = rms_norm(few.double(), None, decoder.config.norm_eps)
    y = head_on(decoder, spec, head).features(few.to(decoder.device)).double().cpu()
    square = x.T @ x / len(x)
    square += _RIDGE * square.diagonal().mean() * torch.eye(len(square))
    linear = torch.linalg.solve(square, x.T @ y / len(x)).T
    values, vectors = torch.linalg.eigh(square)
    # What all logits share changes no probability.
    u, s, v = torch.linalg.svd((rows - rows.mean(dim=0)) @ linear @ (vectors * values.sqrt()), full_matrices=False)
    w, wide = sizes.width, at_least_float32(decoder.dtype)
    draw = torch.Generator().manual_seed(seed)
    found = {name: torch.zeros(shape, dtype=wide) for name, shape in sizes.tensor_shapes(len(square)).items()}
    found["gate.down.weight"] = v[:w] @ (vectors / values.sqrt()).T
    found["gate.shortlist.weight"] = u[:, :w] * s[:w] / spec.temperature
    found["gate.odds.weight"] += ODDS
    found["gate.0.weight"] = torch.randn(w, w, generator=draw) * (2 / w) ** 0.5
    return {name: tensor.to(wide).contiguous() for name, tensor in found.items()}


def train_gate(sizes: GateSpec, start: dict[str, Tensor], lesson: Lesson, eps: float, seed: int) -> dict[str, Tensor]:
    """A gate trained by the cross-entropy to its targets.

    Args:
        sizes: of the gate.
        start: its initial tensors.
        lesson: what it learns from.
        eps: of the model's norms.
        seed: of the order of the tokens and of dropout.

    Returns:
        Its tensors by the names of the file, float32 or wider, on the CPU.
    """
    gate = TrainableGate(sizes, start, eps, seed)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    order, n = torch.Generator().manual_seed(seed), len(lesson.hidden)
    total = EPOCHS * -(-n // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, total))
    target = lesson.target.to(start["gate.2.bias"].dtype)
    for _ in range(EPOCHS):
        for rows in torch.randperm(n, generator=order).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(gate(lesson.hidden[rows]), target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return gate.tensors()
