"""Gates: the probability that an exit's token is the full model's, without a look at the whole vocabulary.

With h the hidden state and rms(.) the parameter-free RMS norm, a gate is a classifier (as in CALM, arXiv 2207.07061,
with a hidden layer)

    g(x) = G2 relu(G0 x + b0) + b2

and there are two forms:

    width alone         sigmoid(g(rms(h)))
    width and tokens    sigmoid(a logit(max p) + w . p + g(u)),  p = softmax(S u + s),  u = rms(D h)

The second guesses max-prob from a shortlist: D brings h to `width` numbers, and S holds the logits of `tokens` frequent
tokens. Where the likeliest token stands out among those, it mostly does among all; w knows which tokens to trust.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from eeinfer.ops.norm import at_least_float32, rms_norm

ODDS_EPS = 1e-6  # max p is kept so far from 0 and 1


@dataclass(frozen=True, slots=True)
class GateSpec:
    """Sizes of a gate.

    Attributes:
        width: of its hidden layer, and of what h is brought to where there is a shortlist.
        tokens: on the shortlist; `None` without one.
    """

    width: int
    tokens: int | None = None

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names (below `exits.{i}.`) and shapes of its tensors."""
        w, seen = self.width, hidden_size if self.tokens is None else self.width
        shapes: dict[str, tuple[int, ...]] = {
            "gate.0.weight": (w, seen),
            "gate.0.bias": (w,),
            "gate.2.weight": (1, w),
            "gate.2.bias": (1,),
        }
        if (k := self.tokens) is not None:
            shapes |= {"gate.down.weight": (w, hidden_size), "gate.odds.weight": (1,), "gate.tokens.weight": (1, k)}
            shapes |= {"gate.shortlist.weight": (k, w), "gate.shortlist.bias": (k,)}
        return shapes


def gate_logit(
    spec: GateSpec, tensors: Mapping[str, Tensor], eps: float, relu: Callable[[Tensor], Tensor] = F.relu
) -> Callable[[Tensor], Tensor]:
    """A gate before its sigmoid, [n, d] to [n] in float32 or wider. Training runs the very same one.

    Args:
        spec: its sizes.
        tensors: as named by `spec.tensor_shapes`, all on one device.
        eps: of the model's norms.
        relu: of the hidden layer; training drops some of it.
    """
    # Thresholds lie near 1, where bfloat16 tells few probabilities apart; the gate is small, so float32 costs little.
    own = {name.removeprefix("gate."): t.to(at_least_float32(t.dtype)) for name, t in tensors.items()}
    wide = own["0.weight"].dtype

    def classified(x: Tensor) -> Tensor:
        return F.linear(relu(F.linear(x, own["0.weight"], own["0.bias"])), own["2.weight"], own["2.bias"]).squeeze(-1)

    def by_shortlist(h: Tensor) -> Tensor:
        u = rms_norm(F.linear(h.to(wide), own["down.weight"]), None, eps)
        p = F.linear(u, own["shortlist.weight"], own["shortlist.bias"]).softmax(dim=-1)
        odds = own["odds.weight"] * p.amax(dim=-1).logit(ODDS_EPS)
        return odds + F.linear(p, own["tokens.weight"]).squeeze(-1) + classified(u)

    return by_shortlist if spec.tokens is not None else lambda h: classified(rms_norm(h.to(wide), None, eps))


def plain_gate(spec: GateSpec, tensors: Mapping[str, Tensor], eps: float) -> Callable[[Tensor], Tensor]:
    """A gate, [n, d] to probabilities [n] in float32 or wider; arguments as for `gate_logit`."""
    logit = gate_logit(spec, tensors, eps)
    return lambda h: logit(h).sigmoid()
