"""Fits learned completion (`eeinfer.exits.learned_kv`) to the KV that the model makes when it runs all layers.

For each exit: a is the number by which the propagated K or V of a head fits best; what is left is fitted by ridge
regression on x, in which K and V of all layers count alike, and whose map is brought to a low rank (Izenman 1975, doi
10.1016/0047-259X(75)90042-1). Tokens that would leave at the exit count most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from eeinfer.engine.build import head_on
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.heads import ExitHead
from eeinfer.exits.learned_kv import LearnedKV, LearnedKVSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import at_least_float32, rms_norm
from eeinfer.training.traces import Answered, hidden_states

MOST = 800  # answers
OTHERS = 0.05  # weight of a token that would not leave
RIDGE = 3e-3
_ROWS = 512  # logits at a time


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Tokens at one exit, with what their KV should be.

    Attributes:
        hidden: [n, d].
        weight: [n], what each counts.
        exact: K, before positions turn it, and V of the m layers after the first that is skipped, [2, m, n, kv_heads,
            head_dim] in float32 or wider.
        propagated: alike, as `propagate` makes them of `hidden`.
    """

    hidden: Tensor
    weight: Tensor
    exact: Tensor
    propagated: Tensor


@torch.inference_mode()
def with_learned_kv(
    decoder: Decoder, heads: HeadsFile, answers: Sequence[Answered], thresholds: Sequence[float], rank: int
) -> HeadsFile:
    """The heads with a learned completion at each exit that skips more than one layer; the first is exact anyway.

    Args:
        decoder: the model, with its plain weights.
        heads: with gates, where these decide who leaves.
        answers: the model's own; no more than `MOST` are used, evenly spread.
        thresholds: of each exit, of the gate or of max-prob; inf: all tokens count there alike.
        rank: of the maps, where they are not smaller.
    """
    exits = _exits(decoder, heads)
    sums: dict[int, _Sums] = {}
    for i, example in examples(decoder, exits, answers, thresholds):
        if i not in sums:
            sums[i] = _Sums(example, decoder.config.norm_eps)
        sums[i].add(example)
    stored = torch.promote_types(decoder.dtype, torch.bfloat16)
    specs, tensors = list(heads.specs), list(heads.tensors)
    for i, found in sums.items():
        specs[i] = replace(specs[i], completion=found.spec(rank))
        tensors[i] = tensors[i] | {name: tensor.to(stored) for name, tensor in found.solved(rank).items()}
    return HeadsFile(tuple(specs), tuple(tensors))


@torch.inference_mode()
def errors(
    decoder: Decoder, heads: HeadsFile, answers: Sequence[Answered], thresholds: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Error of the skipped KV by exit (its index), as `propagate` and as `learned` leave it.

    It is the squared error of K and V, before positions turn K, as a share of their squares, mean over layers. Exits
    without a learned completion are left out. Arguments as for `with_learned_kv`, whose heads they are.
    """
    exits = _exits(decoder, heads)
    totals: dict[int, Tensor] = {}
    for i, example in examples(decoder, exits, answers, thresholds):
        if (learned := exits[i].learned_kv) is not None:
            parts = (example.exact, example.exact - example.propagated, example.exact - corrected(learned, example))
            squares = torch.stack([_by_layer(part.square(), example.weight) for part in parts]).double()
            totals[i] = totals.get(i, torch.zeros_like(squares)) + squares
    shares = {i: (total[1:] / total[0]).mean(dim=(1, 2)).tolist() for i, total in totals.items()}
    return {i: (before, after) for i, (before, after) in shares.items()}


def corrected(learned: LearnedKV, example: Example) -> Tensor:
    """K and V of an example as `learned` makes them, before positions turn K."""
    return learned.scale * example.propagated + learned.shift(example.hidden)


def examples(
    decoder: Decoder, exits: Sequence[ExitHead], answers: Sequence[Answered], thresholds: Sequence[float]
) -> Iterator[tuple[int, Example]]:
    """What there is to learn from answers: indices of exits that skip more than one layer, and examples of each."""
    answers = answers[:: max(1, -(-len(answers) // MOST))]
    first, wide = exits[0].layers_executed, at_least_float32(decoder.dtype)

    def kv(layers: range, hidden: Tensor) -> Tensor:
        return torch.stack(decoder.unturned_kv(layers, hidden)).to(wide)

    for states in hidden_states(decoder, answers, range(first, decoder.num_layers)):
        for i, (head, threshold) in enumerate(zip(exits, thresholds, strict=True)):
            hidden, layers = states[head.layers_executed - first], range(head.layers_executed + 1, decoder.num_layers)
            if layers:
                exact = [kv(range(layer, layer + 1), states[layer - first]) for layer in layers]
                weight = _weight(head, hidden, threshold).to(wide)
                yield i, Example(hidden, weight, torch.cat(exact, dim=1), kv(layers, hidden))


def _weight(head: ExitHead, hidden: Tensor, threshold: float) -> Tensor:
    """What each token [n] counts."""
    if not isfinite(threshold):
        return torch.ones(len(hidden), device=hidden.device)
    sure = torch.cat([_confidence(head, piece) for piece in hidden.split(_ROWS)])
    return torch.where(sure >= threshold, 1.0, OTHERS)


def _confidence(head: ExitHead, hidden: Tensor) -> Tensor:
    return head.logits(hidden).float().softmax(dim=-1).amax(dim=-1) if head.gate is None else head.gate(hidden)


def _exits(decoder: Decoder, heads: HeadsFile) -> list[ExitHead]:
    return [head_on(decoder, spec, own) for spec, own in zip(heads.specs, heads.tensors, strict=True)]


def _by_layer(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted sums [2, m] of values [2, m, n, kv_heads, head_dim]."""
    return torch.einsum("kmnhd,n->km", values, weight)


class _Sums:
    """Weighted sums over the tokens of an exit. The first example fixes a, and how much each K and V counts."""

    def __init__(self, first: Example, eps: float) -> None:
        self._eps = eps
        self._sizes = first.exact.shape
        w = first.weight[:, None, None]
        products, squares = ((w * first.propagated * x).sum(dim=(2, 4)) for x in (first.exact, first.propagated))
        tiny = torch.finfo(squares.dtype).tiny
        self._scale = products / squares.clamp_min(tiny)  # [2, m, kv_heads]
        mean = (w * first.exact).sum(dim=2, keepdim=True) / first.weight.sum()
        self._unit = _by_layer((first.exact - mean).square(), first.weight).clamp_min(tiny).sqrt()[..., None, None]
        d = first.hidden.shape[-1] + 1
        columns = first.exact[:, :, 0].numel()
        self._squares = torch.zeros(d, d, dtype=torch.float64)
        self._products = torch.zeros(d, columns, dtype=torch.float64)

    def add(self, example: Example) -> None:
        """Take in an example."""
        root = example.weight.sqrt()[:, None]
        x = rms_norm(example.hidden.to(root.dtype), None, self._eps)
        x = torch.cat((x, torch.ones_like(root)), dim=1) * root
        left = (example.exact - self._scale[:, :, None, :, None] * example.propagated).permute(2, 0, 1, 3, 4)
        left = (left / self._unit).flatten(1) * root
        self._squares += (x.T @ x).to("cpu", torch.float64)
        self._products += (x.T @ left).to("cpu", torch.float64)

    def spec(self, rank: int) -> LearnedKVSpec:
        """Sizes of what is solved for."""
        _, layers, _, kv_heads, head_dim = self._sizes
        return LearnedKVSpec(min(rank, *self._products[:-1].shape), layers, kv_heads, head_dim)

    def solved(self, rank: int) -> dict[str, Tensor]:
        """The tensors, as named by `LearnedKVSpec.tensor_shapes`, on the CPU."""
        mean_x, mean_y = self._squares[-1, :-1] / self._squares[-1, -1], self._products[-1] / self._squares[-1, -1]
        squares = self._squares[:-1, :-1] - self._squares[-1, -1] * torch.outer(mean_x, mean_x)
        products = self._products[:-1] - self._squares[-1, -1] * torch.outer(mean_x, mean_y)
        ridge = RIDGE * self._squares[:-1, :-1].diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
        full = torch.linalg.solve(squares + ridge, products)  # [d, columns]
        root = torch.linalg.cholesky(squares + ridge)
        # With root root^T the squares of x, the rows of root^T full are the fitted values, but for a rotation.
        left, lengths, right = torch.linalg.svd(root.T @ full, full_matrices=False)
        down = torch.linalg.solve_triangular(root.T, left[:, :rank], upper=True)
        up = lengths[:rank, None] * right[:rank]
        unit = self._unit.cpu().double().expand(self._sizes[:2] + self._sizes[3:]).flatten()
        return {
            "completion.scale": self._scale.cpu(),
            "completion.down.weight": down.T,
            "completion.up.weight": (up * unit).T,
            "completion.up.bias": (mean_y - mean_x @ down @ up) * unit,
        }
