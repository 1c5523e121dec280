"""The loss of an answer: the share of its tokens that the unmodified model would not have chosen there.

Each token is judged on the same prompt and the same tokens before it, with exact KV, by one full-depth prefill over
prompt and answer. So one changed token costs one token, where a comparison of two free-running answers, position by
position, would count everything after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eeinfer.errors import ConfigError
from eeinfer.model.decoder import Decoder
from eeinfer.ops.parts import Stats
from eeinfer.training.traces import Answered, hidden_states

TIE = 0.05
Ids = tuple[int, ...]
_ROWS = 512  # logits at a time: 0.3 GiB in float32 at a vocabulary of 128k


@dataclass(frozen=True, slots=True)
class PromptLoss:
    """The loss of one answer.

    Attributes:
        loss: share of the tokens that differ: the model's top probability exceeds theirs by more than `tie`.
        strict_loss: share of the tokens that are not the model's argmax.
        tokens: tokens judged, an end-of-sequence token included.
    """

    loss: float
    strict_loss: float
    tokens: int


@torch.inference_mode()
def token_losses(
    decoder: Decoder,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    eos_token_ids: Collection[int],
    tie: float = TIE,
) -> list[PromptLoss | None]:
    """The loss of each answer; `None` for one without tokens.

    It says something about greedy answers only: a sampled token may well not be the likeliest.

    Args:
        decoder: the unmodified model.
        answers: token ids of each prompt (not empty) and of its answer.
        eos_token_ids: tokens that end an answer. What follows the first is not judged: nobody would see it.
        tie: largest gap in probability that is still put down to rounding, in [0, 1).

    Raises:
        ConfigError: `tie` is out of range.
    """
    if not 0 <= tie < 1:
        raise ConfigError(f"tie is {tie}; it is a gap between probabilities, so give a number in 0 … 1, such as {TIE}")
    judged = [(tuple(prompt), _up_to_eos(answer, eos_token_ids)) for prompt, answer in answers]
    told = [(prompt, answer) for prompt, answer in judged if answer]
    if not told:
        return [None] * len(judged)
    differences = torch.cat(list(_differences(decoder, told, tie)))
    by_answer = iter(differences.split([len(answer) for _, answer in told]))
    return [_mean(next(by_answer)) if answer else None for _, answer in judged]


def _up_to_eos(answer: Sequence[int], eos_token_ids: Collection[int]) -> tuple[int, ...]:
    end = next((i for i, token in enumerate(answer, start=1) if token in eos_token_ids), len(answer))
    return tuple(answer[:end])


def _differences(decoder: Decoder, told: list[tuple[Ids, Ids]], tie: float) -> Iterator[Tensor]:
    """For the tokens of all answers in order, in pieces: whether each differs, and strictly, bool [n, 2]."""
    # The last token of an answer predicts nothing.
    runs = [Answered("", prompt + answer[:-1], len(prompt) - 1) for prompt, answer in told]
    tokens = torch.tensor([token for _, answer in told for token in answer], device=decoder.device)
    for [hidden] in hidden_states(decoder, runs, [decoder.num_layers]):
        for piece in hidden.split(_ROWS):
            yield _judge(decoder.logit_stats, decoder.logits(piece), tokens[: len(piece)], tie)
            tokens = tokens[len(piece) :]


def _judge(compute: Stats, logits: Tensor, tokens: Tensor, tie: float) -> Tensor:
    """Whether tokens [n] differ, and strictly, given the model's logits [n, V] in their place: bool [n, 2]."""
    stats = compute(logits, second=False, mean=False)
    own = logits.gather(1, tokens[:, None]).squeeze(1).to(stats.log_sum_exp.dtype)
    gap = (stats.largest - stats.log_sum_exp).exp() - (own - stats.log_sum_exp).exp()
    agrees = gap <= tie  # asked this way round, NaN agrees with nothing
    return torch.stack((~agrees, stats.argmax != tokens), dim=1).cpu()


def _mean(differences: Tensor) -> PromptLoss:
    loss, strict_loss = differences.double().mean(dim=0).tolist()
    return PromptLoss(loss, strict_loss, len(differences))
