"""Learned completion: the KV of skipped layers, from what `propagate` gives and a map fitted to the model's own KV.

`propagate` takes an exit's hidden state h for the input of every layer after it. That holds for the first of them; in
deeper ones the state has grown and turned, and K and V are further off the longer the way. With x the parameter-free
RMS norm of h and k', v' what `propagate` makes of layer l, before positions turn it,

    k_l = a_l k' + U_l V x + b_l        and v_l alike

a holds one number a head, V x is shared by all layers after the exit, and U_l brings it back: reduced-rank regression
(Izenman 1975, doi 10.1016/0047-259X(75)90042-1), made by `eeinfer.training.learned_kv`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from eeinfer.ops.norm import rms_norm


@dataclass(frozen=True, slots=True)
class LearnedKVSpec:
    """Sizes of a learned completion.

    Attributes:
        rank: of the map.
        layers: that it corrects: all after the exit but the first.
        kv_heads, head_dim: of the model.
    """

    rank: int
    layers: int
    kv_heads: int
    head_dim: int

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names (below `exits.{i}.`) and shapes of its tensors."""
        columns = 2 * self.layers * self.kv_heads * self.head_dim
        return {
            "completion.scale": (2, self.layers, self.kv_heads),
            "completion.down.weight": (self.rank, hidden_size),
            "completion.up.weight": (columns, self.rank),
            "completion.up.bias": (columns,),
        }


@dataclass(frozen=True, slots=True, eq=False)
class LearnedKV:
    """The correction of one exit, for the m layers after the first that was skipped.

    Attributes:
        scale: a above, [2, m, 1, kv_heads, 1], K and then V.
        shift: U V x + b of hidden states [n, d]: [2, m, n, kv_heads, head_dim], K before positions turn it.
    """

    scale: Tensor
    shift: Callable[[Tensor], Tensor]


def build_learned_kv(
    spec: LearnedKVSpec,
    tensors: Mapping[str, Tensor],
    eps: float,
    product: Callable[[Tensor], Callable[[Tensor], Tensor]],
) -> LearnedKV:
    """The correction of `spec`.

    Args:
        spec: its sizes.
        tensors: as named by `spec.tensor_shapes`, on the model's device and in its type.
        eps: of the model's norms.
        product: makes the product with a matrix, as the model computes its own.
    """
    down, up = (product(tensors[f"completion.{name}.weight"]) for name in ("down", "up"))
    bias = tensors["completion.up.bias"]
    sizes = (2, spec.layers, spec.kv_heads, spec.head_dim)

    def shift(hidden: Tensor) -> Tensor:
        moved = up(down(rms_norm(hidden, None, eps))) + bias
        return moved.unflatten(-1, sizes).permute(1, 2, 0, 3, 4)

    return LearnedKV(tensors["completion.scale"][:, :, None, :, None], shift)
