"""What `tune-heads --method distill` trains, and how long. Torch-free, since the command line shows the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eeinfer.errors import ConfigError

Kind = Literal["norm", "linear", "mlp"]


@dataclass(frozen=True, slots=True)
class Options:
    """Forms of heads and gates, and the recipe of their training.

    Attributes:
        kind: of the heads.
        width: of the MLP; None: the model's hidden size, or its own MLP's width where that is smaller.
        rank: of the linear map; None: a full matrix.
        gate_width: of the gates; 0: no gates.
        gate_tokens: on the shortlist of each gate.
        completion_rank: of the maps of learned completion; 0: none, and `propagate` it is.
        epochs: passes over the training tokens.
        lr: the highest learning rate.
        batch_tokens: tokens of one step, over all processes.
        candidates: likely tokens that most of the training looks at; 0: the whole vocabulary.
        full_vocabulary_share: share of the steps, the last ones, that look at the whole vocabulary.
    """

    kind: Kind = "mlp"
    width: int | None = None
    rank: int | None = None
    gate_width: int = 192
    gate_tokens: int = 512
    completion_rank: int = 128
    epochs: float = 3.0
    lr: float = 1e-3
    batch_tokens: int = 1024
    candidates: int = 8192
    full_vocabulary_share: float = 0.1

    def check(self, hidden_size: int, intermediate_size: int) -> None:
        """See that the model has tensors to start from.

        Raises:
            ConfigError: a head would be wider than what it is copied from, or an option does not fit the kind.
        """
        if self.width is not None and self.kind != "mlp":
            raise ConfigError(f"--width is that of the MLP, which --kind {self.kind} has not: leave it out")
        if self.rank is not None and self.kind == "norm":
            raise ConfigError("--rank is that of the linear map, which --kind norm has not: leave it out")
        if self.width is not None and self.width > intermediate_size:
            raise ConfigError(f"--width {self.width} is above that of the model's own MLP, {intermediate_size}")
        if self.rank is not None and self.rank > hidden_size:
            raise ConfigError(f"--rank {self.rank} is above the model's hidden size, {hidden_size}")
