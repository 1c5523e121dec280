"""Exit heads: from the hidden state after some layers to logits.

With h the hidden state, rms(.) the parameter-free RMS norm and W the vocabulary matrix, the logits are W f(h). f is

    shared   the model's own final norm (LayerSkip, arXiv 2404.16710)
    norm     rms(h) * norm
    linear   rms(A rms(h)) * norm, A full or of low rank (up @ down)  (after Din et al., arXiv 2303.09435)

W is the model's own vocabulary matrix unless the exit brings one (untied).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from eeinfer.ops.norm import rms_norm

HeadKind = Literal["shared", "norm", "linear"]
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExitSpec:
    """One entry of `exit_config.json`.

    Attributes:
        layers_executed: layers run before this exit.
        kind: form of the head.
        rank: of the linear map; `None` for a full one.
        tied: uses the model's vocabulary matrix.
        temperature: logits are divided by it.
    """

    layers_executed: int
    kind: HeadKind
    rank: int | None = None
    tied: bool = True
    temperature: float = 1.0

    def tensor_shapes(self, hidden_size: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Names (below `exits.{i}.`) and shapes of the tensors this head consists of."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kind in {"norm", "linear"}:
            shapes["norm.weight"] = (hidden_size,)
        if self.kind == "linear" and self.rank is None:
            shapes["linear.weight"] = (hidden_size, hidden_size)
        elif self.kind == "linear" and self.rank is not None:
            shapes["linear.down.weight"] = (self.rank, hidden_size)
            shapes["linear.up.weight"] = (hidden_size, self.rank)
        if not self.tied:
            shapes["lm_head.weight"] = (vocab_size, hidden_size)
        return shapes


@dataclass(frozen=True, slots=True)
class ExitHead:
    """A head ready to run.

    Attributes:
        layers_executed: layers run before it.
        features: f above, [n, d] to [n, d].
        vocabulary: [n, d] to logits [n, V].
        temperature: logits are divided by it.
    """

    layers_executed: int
    features: Map
    vocabulary: Map
    temperature: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, d], divided by the exit's temperature."""
        logits = self.vocabulary(self.features(hidden))
        return logits if self.temperature == 1.0 else logits / self.temperature


def build_head(
    spec: ExitSpec, tensors: Mapping[str, Tensor], *, final_norm: Map, vocabulary: Map, eps: float
) -> ExitHead:
    """The head of `spec`.

    Args:
        spec: its entry in the file.
        tensors: as named by `spec.tensor_shapes`, in the model's type and on its device.
        final_norm: the model's own final norm.
        vocabulary: the model's own vocabulary product.
        eps: of the model's norms.
    """
    own = tensors.get("lm_head.weight")
    return ExitHead(
        spec.layers_executed,
        _features(spec, tensors, final_norm, eps),
        vocabulary if own is None else lambda x: F.linear(x, own),
        spec.temperature,
    )


def _features(spec: ExitSpec, tensors: Mapping[str, Tensor], final_norm: Map, eps: float) -> Map:
    if spec.kind == "shared":
        return final_norm
    norm = tensors["norm.weight"]
    if spec.kind == "norm":
        return lambda h: rms_norm(h, norm, eps)
    if spec.rank is None:
        full = tensors["linear.weight"]
        return lambda h: rms_norm(F.linear(rms_norm(h, None, eps), full), norm, eps)
    down, up = tensors["linear.down.weight"], tensors["linear.up.weight"]
    return lambda h: rms_norm(F.linear(F.linear(rms_norm(h, None, eps), down), up), norm, eps)
