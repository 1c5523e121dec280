"""Exit heads: from the hidden state after some layers to logits, and gates, which say whether to trust them.

With h the hidden state, rms(.) the parameter-free RMS norm and W the vocabulary matrix, the logits are W f(h). f is

    shared   the model's own final norm (LayerSkip, arXiv 2404.16710)
    norm     rms(h) * norm
    linear   rms(A rms(h)) * norm, A full or of low rank (up @ down)  (after Din et al., arXiv 2303.09435)
    mlp      rms(A rms(h) + D (silu(G z) * (U z))) * norm, z = rms(h) * mlp_norm, A as in linear: beside the linear map
             a gated MLP as in a layer of the model (Shazeer, arXiv 2002.05202)

W is the model's own vocabulary matrix unless the exit brings one (untied). An exit of any kind may have a gate, whose
forms are in `eeinfer.exits.gates`, and what completion by `learned` needs (`eeinfer.exits.learned_kv`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from eeinfer.exits.gates import GateSpec, plain_gate
from eeinfer.exits.learned_kv import LearnedKV, LearnedKVSpec, build_learned_kv
from eeinfer.ops.norm import rms_norm

HeadKind = Literal["shared", "norm", "linear", "mlp"]
Map = Callable[[Tensor], Tensor]
Product = Callable[[Tensor], Map]
Gate = Callable[[GateSpec, Mapping[str, Tensor], float], Map]


@dataclass(frozen=True, slots=True)
class ExitSpec:
    """One entry of `exit_config.json`.

    Attributes:
        layers_executed: layers run before this exit.
        kind: form of the head.
        rank: of the linear map; `None` for a full one.
        tied: uses the model's vocabulary matrix.
        temperature: logits are divided by it.
        intermediate: width of the MLP; `None` for other kinds.
        gate: sizes of the gate; `None` for no gate.
        completion: sizes of the learned completion; `None` for none.
    """

    layers_executed: int
    kind: HeadKind
    rank: int | None = None
    tied: bool = True
    temperature: float = 1.0
    intermediate: int | None = None
    gate: GateSpec | None = None
    completion: LearnedKVSpec | None = None

    def tensor_shapes(self, hidden_size: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Names (below `exits.{i}.`) and shapes of the tensors this head consists of."""
        d = hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kind != "shared":
            shapes["norm.weight"] = (d,)
        if self.kind in {"linear", "mlp"}:
            shapes |= _linear_shapes(self.rank, d)
        if self.kind == "mlp":
            f = self.intermediate
            assert f is not None, "an mlp has a width"
            shapes |= {"mlp_norm.weight": (d,), "mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)}
            shapes["mlp.down_proj.weight"] = (d, f)
        if self.gate is not None:
            shapes |= self.gate.tensor_shapes(d)
        if self.completion is not None:
            shapes |= self.completion.tensor_shapes(d)
        if not self.tied:
            shapes["lm_head.weight"] = (vocab_size, d)
        return shapes


def _linear_shapes(rank: int | None, d: int) -> dict[str, tuple[int, ...]]:
    if rank is None:
        return {"linear.weight": (d, d)}
    return {"linear.down.weight": (rank, d), "linear.up.weight": (d, rank)}


@dataclass(frozen=True, slots=True)
class ExitHead:
    """A head ready to run.

    Attributes:
        layers_executed: layers run before it.
        features: f above, [n, d] to [n, d].
        vocabulary: [n, d] to logits [n, V].
        temperature: logits are divided by it.
        gate: [n, d] to probabilities [n] in float32 or wider; None where the exit has no gate.
        learned_kv: corrects the KV of skipped layers; None where the exit has nothing for it.
    """

    layers_executed: int
    features: Map
    vocabulary: Map
    temperature: float = 1.0
    gate: Map | None = None
    learned_kv: LearnedKV | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, d], divided by the exit's temperature."""
        logits = self.vocabulary(self.features(hidden))
        return logits if self.temperature == 1.0 else logits / self.temperature


def plain_product(weight: Tensor) -> Map:
    """The product with a matrix [m, d], [n, d] to [n, m]."""
    return lambda x: F.linear(x, weight)


def build_head(
    spec: ExitSpec,
    tensors: Mapping[str, Tensor],
    *,
    final_norm: Map,
    vocabulary: Map,
    eps: float,
    product: Product = plain_product,
    gate: Gate = plain_gate,
) -> ExitHead:
    """The head of `spec`.

    Args:
        spec: its entry in the file.
        tensors: as named by `spec.tensor_shapes`, on the model's device and in its type; those of the gate are computed
            in float32 or wider, and best kept so.
        final_norm: the model's own final norm.
        vocabulary: the model's own vocabulary product.
        eps: of the model's norms.
        product: makes the product with a matrix of the head, as the model computes its own.
        gate: makes its gate.
    """
    own = tensors.get("lm_head.weight")
    return ExitHead(
        spec.layers_executed,
        features(spec, tensors, final_norm, eps, product),
        vocabulary if own is None else product(own),
        spec.temperature,
        None if spec.gate is None else gate(spec.gate, gate_tensors(tensors), eps),
        None if spec.completion is None else build_learned_kv(spec.completion, tensors, eps, product),
    )


def features(
    spec: ExitSpec, tensors: Mapping[str, Tensor], final_norm: Map, eps: float, product: Product = plain_product
) -> Map:
    """The map f of a head, [n, d] to [n, d]; see `build_head`. Training runs the very same one."""
    if spec.kind == "shared":
        return final_norm
    norm = tensors["norm.weight"]
    if spec.kind == "norm":
        return lambda h: rms_norm(h, norm, eps)
    linear = _linear(spec, tensors, product)
    if spec.kind == "linear":
        return lambda h: rms_norm(linear(rms_norm(h, None, eps)), norm, eps)
    mlp_norm, mlp = tensors["mlp_norm.weight"], _mlp(tensors, product)
    return lambda h: rms_norm(linear(rms_norm(h, None, eps)) + mlp(rms_norm(h, mlp_norm, eps)), norm, eps)


def _linear(spec: ExitSpec, tensors: Mapping[str, Tensor], product: Product) -> Map:
    if spec.rank is None:
        return product(tensors["linear.weight"])
    down, up = product(tensors["linear.down.weight"]), product(tensors["linear.up.weight"])
    return lambda x: up(down(x))


def _mlp(tensors: Mapping[str, Tensor], product: Product) -> Map:
    gate, up, down = (product(tensors[f"mlp.{name}_proj.weight"]) for name in ("gate", "up", "down"))
    return lambda z: down(F.silu(gate(z)) * up(z))


def gate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a head's tensors that its gate consists of."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("gate.")}
