"""The calls into the native kernels, with their torch references.

All tensors are contiguous bfloat16 on the CPU unless said otherwise. A row's result is bitwise the same whatever the
other rows are: each sum has one order (see `linear.h` and `attention.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eeinfer.ops.logit_stats import LogitStats
from eeinfer.ops.token_batch import TokenBatch

HEAD_SIZES = (32, 64, 96, 128, 256)
PACKED = ("qkv", "output", "gate_up", "down")  # the matrices of a layer, which are copied in another order


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim")] + [
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class _LayerWeights(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("attention_norm", "mlp_norm", "qkv", "output", "gate_up", "down"),
            *("qkv_bias", "output_bias", "gate_up_bias", "down_bias", "q_norm", "k_norm"),
        )
    ]


class _Tokens(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("count", "table_width", "block_size")] + [
        (name, ctypes.c_void_p) for name in ("positions", "slots", "owners", "block_tables", "cos", "sin")
    ]


class _Gate(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int) for name in ("hidden", "width", "tokens")]
        + [(name, ctypes.c_float) for name in ("eps", "odds_eps", "odds", "bias")]
        + [(name, ctypes.c_void_p) for name in ("down", "shortlist", "inner")]
        + [(name, ctypes.c_void_p) for name in ("shortlist_bias", "inner_bias", "outer", "trust")]
    )


class Times(ctypes.Structure):
    """Nanoseconds spent in the parts of layers, added up."""

    _fields_ = [(name, ctypes.c_int64) for name in ("linear", "attention", "rest")]
    linear: int
    attention: int
    rest: int


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a layer; `eps` of its RMS norms; scores are multiplied by `scale`."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


class PackedLinear:
    """A matrix of bfloat16 [columns, inputs] in the order in which the kernel reads it; inputs are even.

    `in_place`: it takes the memory of `weight`, which is of no use after that, where it fits.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, *, in_place: bool = False) -> None:
        self.columns, self.inputs = weight.shape
        self.packed = _pack(library, weight, in_place=in_place)
        self._library = library

    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] to [n, columns]; the reference is `torch.nn.functional.linear`."""
        x = x.contiguous()
        out = torch.empty(len(x), self.columns, dtype=x.dtype)
        args = (_at(x), len(x), self.inputs, _at(self.packed), self.columns, None, _at(out), torch.get_num_threads())
        self._library.ee_linear(*args)
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [n, inputs] of the matrix at `indices` [n]; the reference is `torch.nn.functional.embedding`."""
        indices = indices.contiguous()
        out = torch.empty(len(indices), self.inputs, dtype=self.packed.dtype)
        args = (_at(self.packed), self.inputs, _at(indices), len(indices), _at(out), torch.get_num_threads())
        self._library.ee_packed_rows(*args)
        return out


class NativeGate:
    """A gate with a shortlist; the reference is `eeinfer.exits.gates.gate_logit` and a sigmoid.

    Its matrices, and what they multiply, are in bfloat16, all that is added up in float32.

    Args:
        library: see `eeinfer.ops.native.build.load`.
        tensors: as in `eeinfer.exits.gates.GateSpec.tensor_shapes`, in any number type; width and hidden size are even.
        eps: of the model's norms.
        odds_eps: how far the largest probability is kept from 0 and 1.
    """

    def __init__(self, library: ctypes.CDLL, tensors: Mapping[str, Tensor], eps: float, odds_eps: float) -> None:
        matrices = {"down": "down", "shortlist": "shortlist", "inner": "0"}
        vectors = {
            "shortlist_bias": "shortlist.bias",
            "inner_bias": "0.bias",
            "outer": "2.weight",
            "trust": "tokens.weight",
        }
        self._library = library
        self._held = {
            ours: _pack(library, tensors[f"gate.{name}.weight"].bfloat16().contiguous(), in_place=False)
            for ours, name in matrices.items()
        }
        self._held |= {ours: tensors[f"gate.{name}"].float().contiguous() for ours, name in vectors.items()}
        width, hidden = tensors["gate.down.weight"].shape
        self._gate = _Gate(
            *(hidden, width, tensors["gate.shortlist.weight"].shape[0], eps, odds_eps),
            *(tensors["gate.odds.weight"].item(), tensors["gate.2.bias"].item()),
            **{name: _at(tensor) for name, tensor in self._held.items()},
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, d] to probabilities, float32 [n]."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden))
        self._library.ee_gate(ctypes.byref(self._gate), _at(hidden), len(hidden), _at(out), torch.get_num_threads())
        return out


class NativeStats:
    """Statistics of logits; the reference is `eeinfer.ops.logit_stats.logit_stats`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, logits: Tensor, *, second: bool, mean: bool) -> LogitStats:
        """As `logit_stats`; logits [n, V]."""
        numbers, argmax = self._call(logits, sums=True, second=second, mean=mean)
        largest, log_sum_exp, runner_up, average = numbers.unbind(1)
        return LogitStats(largest, argmax, log_sum_exp, runner_up, average, logits.shape[1])

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Largest logit, float32 [n], and its first index, int64 [n]; NaN for rows that hold one."""
        numbers, argmax = self._call(logits, sums=False, second=False, mean=False)
        return numbers[:, 0], argmax

    def _call(self, logits: Tensor, *, sums: bool, second: bool, mean: bool) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        rows, size = logits.shape
        numbers, argmax = torch.empty(rows, 4), torch.empty(rows, dtype=torch.int64)
        threads = torch.get_num_threads()
        self._library.ee_logit_stats(_at(logits), rows, size, sums, second, mean, _at(numbers), _at(argmax), threads)
        return numbers, argmax


class NativeLayers:
    """Transformer layers of one shape: pre-norm, rotary positions, grouped query heads, a gated MLP with SiLU.

    Args:
        library: see `eeinfer.ops.native.build.load`.
        sizes: head_dim is one of `HEAD_SIZES`; hidden and intermediate are even.
        layers: the `TENSORS` of each layer, as in `eeinfer.model.weights.LayerWeights`; biases and norms of heads are
            None where there are none. Matrices are copied in another order.
        in_place: the copies take the memory of the matrices, which are of no use after that, where they fit.
    """

    TENSORS = tuple(field[0] for field in _LayerWeights._fields_)

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: LayerSizes,
        layers: Sequence[Mapping[str, Tensor | None]],
        *,
        in_place: bool = False,
    ) -> None:
        assert sizes.head_dim in HEAD_SIZES, "callers look before they ask"
        self._library = library
        self._sizes = _Sizes(
            *(sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.eps, sizes.scale)
        )
        self._kv = (sizes.kv_heads, sizes.head_dim)
        self._held = [
            _prepared(library, layer, in_place=in_place) for layer in layers
        ]  # the structures below point into these
        self._layers = (_LayerWeights * len(layers))(
            *(_LayerWeights(**{n: _at(t) for n, t in layer.items()}) for layer in self._held)
        )

    def layer(
        self,
        index: int,
        hidden: Tensor,
        batch: TokenBatch,
        cache: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        times: Times | None = None,
    ) -> Tensor:
        """Run one layer; the reference is `eeinfer.model.decoder.Decoder`'s layer in torch.

        Args:
            index: which one.
            hidden: [n, d].
            batch: the n tokens.
            cache: [2, num_blocks, block_size, kv_heads, head_dim], the layer's; K and V are written in place.
            rotation: float32 [n, 1, head_dim / 2] each.
            times: takes the time spent, if given.

        Returns:
            [n, d].
        """
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        assert rotation is not None, "callers look before they ask"
        cos, sin = rotation
        tables = batch.block_tables.contiguous()
        tokens = _Tokens(
            *(len(hidden), tables.shape[1], cache.shape[2], _at(batch.positions), _at(batch.slots)),
            *(_at(batch.owners), _at(tables), _at(cos), _at(sin)),
        )
        self._library.ee_layer(
            *(ctypes.byref(self._sizes), ctypes.byref(self._layers[index]), ctypes.byref(tokens)),
            *(_at(cache[0]), _at(cache[1]), _at(hidden), _at(out), torch.get_num_threads()),
            None if times is None else ctypes.byref(times),
        )
        return out

    def project_kv(
        self, first_layer: int, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """K (rotated) and V of the layers from `first_layer` on; the reference is `Decoder.project_kv` in torch.

        Args:
            first_layer: first of the m layers up to the last.
            hidden: [n, d], what all of them are given.
            rotation: float32 [n, 1, head_dim / 2] each.

        Returns:
            [m, n, kv_heads, head_dim] each.
        """
        hidden = hidden.contiguous()
        count = len(self._held) - first_layer
        k, v = (torch.empty(count, len(hidden), *self._kv, dtype=hidden.dtype) for _ in range(2))
        assert rotation is not None, "callers look before they ask"
        cos, sin = rotation
        self._library.ee_project_kv(
            *(ctypes.byref(self._sizes), ctypes.byref(self._layers[first_layer]), count, _at(hidden), len(hidden)),
            *(_at(cos), _at(sin), _at(k), _at(v), torch.get_num_threads()),
        )
        return k, v


def _prepared(library: ctypes.CDLL, layer: Mapping[str, Tensor | None], *, in_place: bool) -> dict[str, Tensor | None]:
    """The tensors of a layer as the kernels read them."""

    def one(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or name not in PACKED:
            return tensor
        pack = _pack_gate_up if name == "gate_up" else _pack
        return pack(library, tensor, in_place=in_place)

    return {name: one(name, tensor) for name, tensor in layer.items()}


def _pack(library: ctypes.CDLL, weight: Tensor, *, in_place: bool) -> Tensor:
    columns, inputs = weight.shape
    library.ee_packed_size.restype = ctypes.c_int64
    packed = torch.empty(library.ee_packed_size(columns, inputs), dtype=weight.dtype)
    library.ee_pack(_at(weight), columns, inputs, _at(packed))
    return _settled(packed, weight, in_place=in_place)


def _pack_gate_up(library: ctypes.CDLL, weight: Tensor, *, in_place: bool) -> Tensor:
    gate, up = weight.chunk(2)
    width, inputs = gate.shape
    packed = torch.empty(-(-width // 16) * 32 * inputs, dtype=weight.dtype)
    library.ee_pack_gate_up(_at(gate), _at(up), width, inputs, _at(packed))
    return _settled(packed, weight, in_place=in_place)


def _settled(packed: Tensor, weight: Tensor, *, in_place: bool) -> Tensor:
    """What was packed, in the memory of `weight` if it may be there and needs no padding."""
    return weight.view(-1).copy_(packed) if in_place and packed.numel() == weight.numel() else packed


def _at(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())
