"""Heads and gates as modules that can be trained. Their formulas are those of `eeinfer.exits.heads`, run as they are.

Initial tensors are copies wherever there is something to copy: norms are the model's, the linear map is the
least-squares one, and the MLP is made of the strongest neurons of the layer that would come next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eeinfer.exits.gates import GateSpec, gate_logit
from eeinfer.exits.heads import ExitSpec, features
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import at_least_float32

DAMPING = 0.1  # of the copied MLP, so that training starts close to the least-squares map
DROPOUT = 0.2  # of a gate's hidden layer


class TrainableHead(nn.Module):
    """The features of a head: from hidden states [n, d] to what the vocabulary matrix is applied to, [n, d].

    Args:
        spec: its form.
        tensors: initial values by the names of the file; those of a gate are left out.
        eps: of the model's norms.
    """

    def __init__(self, spec: ExitSpec, tensors: Mapping[str, Tensor], eps: float) -> None:
        super().__init__()
        self.spec, self.eps = spec, eps
        # Module names may not hold dots.
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): tensor for name, tensor in tensors.items() if not name.startswith("gate.")}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, d] to [n, d], in the type of the parameters, or of autocast."""
        tensors = {name.replace("/", "."): tensor for name, tensor in self.weights.items()}
        wide = tensors["norm.weight"].dtype
        return features(self.spec, tensors, _no_norm, self.eps)(hidden.to(wide))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the parameters by the names of the file, on the CPU."""
        return {name.replace("/", "."): tensor.detach().cpu().clone() for name, tensor in self.weights.items()}


class TrainableGate(nn.Module):
    """A gate before its sigmoid, [n, d] to [n]; in training a share of its hidden layer is dropped.

    Args:
        spec: its sizes.
        tensors: initial values by the names of the file, float32 or wider.
        eps: of the model's norms.
        seed: of what is dropped.
    """

    def __init__(self, spec: GateSpec, tensors: Mapping[str, Tensor], eps: float, seed: int) -> None:
        super().__init__()
        self.spec, self.eps = spec, eps
        self.draw = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict({name.replace(".", "/"): tensor.clone() for name, tensor in tensors.items()})

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, d] to logits [n]."""
        tensors = {name.replace("/", "."): tensor for name, tensor in self.weights.items()}
        return gate_logit(self.spec, tensors, self.eps, self._dropped)(hidden)

    def _dropped(self, inner: Tensor) -> Tensor:
        kept = torch.rand(inner.shape, generator=self.draw) >= DROPOUT
        return F.relu(inner) * kept / (1 - DROPOUT)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the parameters by the names of the file, on the CPU."""
        return {name.replace("/", "."): tensor.detach().cpu().clone() for name, tensor in self.weights.items()}


def initial_tensors(decoder: Decoder, spec: ExitSpec, linear: Tensor) -> dict[str, Tensor]:
    """What a head starts from, on the CPU in float32 or wider.

    Args:
        decoder: whose tensors are copied.
        spec: form of the head: norm, linear or mlp, no wider than what is copied.
        linear: the least-squares map [d, d] of this exit.
    """
    w, wide = decoder.weights, at_least_float32(decoder.dtype)
    found = {"norm.weight": w.final_norm}
    if spec.kind in {"linear", "mlp"}:
        found |= _linear(linear, spec.rank)
    if spec.kind == "mlp":
        found |= _mlp(decoder, spec)
    return {name: tensor.to("cpu", wide, copy=True).contiguous() for name, tensor in found.items()}


def _linear(full: Tensor, rank: int | None) -> dict[str, Tensor]:
    if rank is None:
        return {"linear.weight": full}
    u, s, v = torch.linalg.svd(full)
    root = s[:rank].sqrt()
    return {"linear.down.weight": root[:, None] * v[:rank], "linear.up.weight": u[:, :rank] * root}


def _mlp(decoder: Decoder, spec: ExitSpec) -> dict[str, Tensor]:
    """The `intermediate` neurons of the next layer with the largest product of the norms of their three vectors."""
    w, layer = decoder.weights, spec.layers_executed
    gate, up = w.gate_up[layer].chunk(2)
    down = w.down[layer]
    assert spec.intermediate is not None, "an mlp has a width"
    strength = gate.float().norm(dim=1) * up.float().norm(dim=1) * down.float().norm(dim=0)
    kept = strength.topk(spec.intermediate).indices.sort().values
    return {
        "mlp_norm.weight": torch.ones_like(w.final_norm) if w.mlp_norm is None else w.mlp_norm[layer],
        "mlp.gate_proj.weight": gate[kept],
        "mlp.up_proj.weight": up[kept],
        "mlp.down_proj.weight": DAMPING * down[:, kept],
    }


def _no_norm(_: Tensor) -> Tensor:
    raise AssertionError("a head that shares the model's norm has nothing to train")
