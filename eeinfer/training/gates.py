"""Gates: trained after the heads to tell from the hidden state whether the head's token will be the model's.

They learn on answers that the heads have not seen: on those that they have, heads are right more often.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

from eeinfer.ops.norm import at_least_float32
from eeinfer.training.modules import TrainableGate

EPOCHS = 30
PATIENCE = 4  # epochs without a better one on the tokens that are held out
PARTS = 50  # runs of tokens, of which every fifth is held out: spread over the file, and hardly an answer is in both
LR = 1e-3
WEIGHT_DECAY = 0.01
BATCH = 128  # tokens


def train_gate(hidden: Tensor, agree: Tensor, width: int, eps: float, seed: int) -> dict[str, Tensor]:
    """A gate with the lowest binary cross-entropy on held-out tokens.

    Args:
        hidden: [n, d] states at the exit, in the order of the answers, on the CPU.
        agree: [n] bool, whether the head's token is the model's.
        width: of the gate's hidden layer.
        eps: of the model's norms.
        seed: of the initial values and of the order.

    Returns:
        Its tensors by the names of the file, float32 or wider, on the CPU.
    """
    wide = at_least_float32(hidden.dtype)
    gate = TrainableGate(hidden.shape[1], width, wide, eps, seed)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    order = torch.Generator().manual_seed(seed)
    part = torch.arange(len(hidden)) * PARTS // max(1, len(hidden))
    seen, held_out = (rows.nonzero().squeeze(1) for rows in (part % 5 != 4, part % 5 == 4))  # noqa: PLR2004 - a fifth
    labels = agree.to(wide)
    best, lowest, stale = gate.tensors(), inf, 0
    for _ in range(EPOCHS):
        for picked in torch.randperm(len(seen), generator=order).split(BATCH):
            rows = seen[picked].sort().values  # files are read in order
            loss = F.binary_cross_entropy_with_logits(gate(hidden[rows].to(wide)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = _loss(gate, hidden, labels, held_out)
        if found < lowest:
            best, lowest, stale = gate.tensors(), found, 0
        elif (stale := stale + 1) >= PATIENCE:
            break
    return best


@torch.no_grad()
def _loss(gate: TrainableGate, hidden: Tensor, labels: Tensor, rows: Tensor) -> float:
    total = 0.0
    for part in rows.split(32 * BATCH):
        logits = gate(hidden[part].to(labels.dtype))
        total += float(F.binary_cross_entropy_with_logits(logits, labels[part], reduction="sum"))
    return total / max(1, len(rows))
