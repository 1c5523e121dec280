"""Teacher-forced traces: what each exit would have said at every token of the model's own full-depth answers.

They cost one pass over the answers for all thresholds together, so they propose the path. They certify nothing: with
exact KV and the model's own tokens before, an exit is right more often than when the engine runs free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eeinfer.exits.check import Exit
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import at_least_float32
from eeinfer.training.traces import Answered, hidden_states

Ids = tuple[int, ...]
_ROWS = 512  # logits at a time, as in `eeinfer.calibration.loss`


@dataclass(frozen=True, slots=True, eq=False)
class Traces:
    """Decode tokens of all answers, one after the other: t of them.

    Attributes:
        layers: layers executed at each of the k exits.
        num_layers: of the model.
        confidence: float64 [k, t].
        loses: bool [k, t], whether the exit's token differs from the model's by more than a tie.
        owner: int [t], the answer each belongs to.
        progress: float64 [t], its number in the answer, from 0, over the most tokens that the answer may have.
        lengths: int [answers], tokens of each answer, its first included.
    """

    layers: tuple[int, ...]
    num_layers: int
    confidence: NDArray[np.float64]
    loses: NDArray[np.bool_]
    owner: NDArray[np.int64]
    progress: NDArray[np.float64]
    lengths: NDArray[np.int64]

    def of(self, layers: Sequence[int]) -> Traces:
        """The same tokens at some of the exits."""
        rows = [self.layers.index(n) for n in layers]
        return Traces(
            tuple(layers),
            self.num_layers,
            self.confidence[rows],
            self.loses[rows],
            self.owner,
            self.progress,
            self.lengths,
        )


@torch.inference_mode()
def trace(
    decoder: Decoder, exits: Sequence[Exit], answers: Sequence[tuple[Ids, Ids]], max_tokens: int, tie: float
) -> Traces:
    """Trace the exits on full-depth answers.

    Args:
        decoder: the model.
        exits: whose heads and measures are used; their thresholds play no part.
        answers: token ids of each prompt and of its answer.
        max_tokens: most tokens of an answer, cut to what the context leaves.
        tie: see `eeinfer.calibration.loss.token_losses`.
    """
    lengths = np.array([len(answer) for _, answer in answers], dtype=np.int64)
    most = [min(max_tokens, decoder.config.max_position - len(prompt)) for prompt, _ in answers]
    # An answer's first token comes from its prompt and cannot leave early.
    runs = [Answered("", prompt + answer[:-1], len(prompt)) for prompt, answer in answers if len(answer) > 1]
    confidence, loses = [], []
    for said, differs in _checked(decoder, exits, runs, tie):
        confidence.append(said)
        loses.append(differs)
    empty = np.zeros((len(exits), 0))
    numbers = [np.arange(1, n) for n in lengths]
    return Traces(
        layers=tuple(exit_.head.layers_executed for exit_ in exits),
        num_layers=decoder.num_layers,
        confidence=np.concatenate([empty, *confidence], axis=1),
        loses=np.concatenate([empty.astype(bool), *loses], axis=1),
        owner=np.repeat(np.arange(len(lengths)), np.maximum(lengths - 1, 0)),
        progress=np.concatenate([np.zeros(0), *(number / n for number, n in zip(numbers, most, strict=True))]),
        lengths=lengths,
    )


def _checked(
    decoder: Decoder, exits: Sequence[Exit], runs: Sequence[Answered], tie: float
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Confidence and whether the token loses, [k, n] each, in pieces of the tokens in order."""
    depths = [exit_.head.layers_executed for exit_ in exits]
    ends = sorted({*depths, *(n - 1 for n in depths), decoder.num_layers})  # similarity looks one layer back
    for states in hidden_states(decoder, runs, ends):
        by_end = dict(zip(ends, states, strict=True))
        for start in range(0, len(states[-1]), _ROWS):
            piece = {end: state[start : start + _ROWS] for end, state in by_end.items()}
            logits = decoder.logits(piece[decoder.num_layers])
            probabilities = logits.to(at_least_float32(logits.dtype)).softmax(dim=-1)
            checked = [_check(exit_, piece, probabilities, tie) for exit_ in exits]
            said, differs = (torch.stack(part).cpu().numpy() for part in zip(*checked, strict=True))
            yield said, differs


def _check(exit_: Exit, states: dict[int, Tensor], probabilities: Tensor, tie: float) -> tuple[Tensor, Tensor]:
    depth = exit_.head.layers_executed
    hidden = states[depth]
    checked = exit_.check(hidden, states[depth - 1])
    token = exit_.head.logits(hidden).argmax(dim=-1) if checked.argmax is None else checked.argmax
    gap = probabilities.amax(dim=-1) - probabilities.gather(1, token[:, None]).squeeze(1)
    return checked.confidence.double(), ~(gap <= tie)  # asked this way round, NaN loses
