"""The loss of answers against a plain float64 computation, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import PlainLlama, Trace
from tiny import EOS, Loop, by_schedule, load_decoder, sequence

from eeinfer.calibration import loss as loss_module
from eeinfer.calibration.loss import PromptLoss, token_losses
from eeinfer.errors import ConfigError
from eeinfer.model.decoder import Decoder
from eeinfer.ops.logit_stats import logit_stats
from eeinfer.training import traces

Answer = tuple[list[int], list[int]]
PROMPTS = [[256, 72, 105], [256, *range(40, 71)], [256]]
# Likely and unlikely tokens mixed, of lengths that cross the borders of groups and pieces.
LENGTHS = [7, 12, 1]


def naive(model: PlainLlama, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Probabilities [answer tokens, V] of the full model, token by token in float64."""
    trace = Trace([[] for _ in range(model.num_layers)], [[] for _ in range(model.num_layers)])
    rows = []
    for position, token in enumerate([*prompt, *answer[:-1]]):
        logits = model.logits(model._run(token, position, model.num_layers, trace))
        rows.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
    return np.stack(rows[len(prompt) - 1 :])


def gaps(model: PlainLlama, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Top probability minus the token's own."""
    rows = naive(model, prompt, answer)
    return rows.max(axis=1) - rows[np.arange(len(answer)), list(answer)]


def mixed_answer(model: PlainLlama, prompt: list[int], length: int, rng: np.random.Generator) -> list[int]:
    """Each token is the most likely one or one of the next three, whichever comes."""
    answer: list[int] = []
    for _ in range(length):
        order = np.argsort(-naive(model, prompt, [*answer, 0])[-1])
        answer.append(int(next(t for t in order[rng.integers(0, 4) :] if t != EOS)))
    return answer


@dataclass(frozen=True)
class Judged:
    """A model, answers of every kind, and the gap of each token."""

    decoder: Decoder
    answers: list[Answer]
    gaps: list[np.ndarray]


@pytest.fixture(scope="module", params=["gqa", "tied-mqa"])
def judged(
    request: pytest.FixtureRequest, tiny_decoder: Callable[..., Decoder], plain: Callable[[str], PlainLlama]
) -> Judged:
    model, rng = plain(request.param), np.random.default_rng(3)
    answers = [(p, mixed_answer(model, p, n, rng)) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    return Judged(tiny_decoder(request.param), answers, [gaps(model, *answer) for answer in answers])


def losses(decoder: Decoder, answers: Sequence[Answer], tie: float = 0.05) -> list[PromptLoss]:
    found = token_losses(decoder, answers, {EOS}, tie)
    assert None not in found
    return [one for one in found if one is not None]


@pytest.mark.parametrize("tie", [0.0, 0.05, 0.3])
def test_the_loss_is_that_of_a_plain_computation(judged: Judged, tie: float) -> None:
    expected = [PromptLoss(float((g > tie).mean()), float((g > 0).mean()), len(g)) for g in judged.gaps]
    assert losses(judged.decoder, judged.answers, tie) == expected
    strict = [one.strict_loss for one in expected]
    assert min(strict[:2]) > 0, "no token differs: the test shows nothing"
    assert max(strict[:2]) < 1, "all tokens differ: the test shows nothing"


def test_a_tie_has_two_sides(judged: Judged) -> None:
    answer, gap = judged.answers[1], np.sort(judged.gaps[1])
    border = float(gap[gap > 0][0])
    [below], [above] = (losses(judged.decoder, [answer], border + nudge) for nudge in (-1e-9, 1e-9))
    assert below.loss == below.strict_loss
    assert below.tokens * (below.loss - above.loss) == pytest.approx(1), "one token lies between the two"
    assert above.strict_loss == below.strict_loss


def test_groups_and_pieces_change_nothing(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(judged.decoder, judged.answers)
    monkeypatch.setattr(loss_module, "_ROWS", 5)
    assert losses(judged.decoder, judged.answers) == whole
    monkeypatch.setattr(traces, "_GROUP_TOKENS", 30)
    assert losses(judged.decoder, judged.answers) == whole


def test_what_follows_the_first_eos_is_not_judged(judged: Judged) -> None:
    prompt, answer = judged.answers[0]
    [ended, going_on] = losses(judged.decoder, [(prompt, [*answer[:3], EOS]), (prompt, [*answer[:3], EOS, 9, EOS])])
    assert ended == going_on
    assert ended.tokens == 4, "the end-of-sequence token is judged"


def test_an_answer_without_tokens_has_no_loss_and_shifts_no_other(judged: Judged) -> None:
    first, second, _ = judged.answers
    found = token_losses(judged.decoder, [([256], []), first, ([256, 1], []), second], {EOS})
    assert found == [None, *losses(judged.decoder, [first]), None, *losses(judged.decoder, [second])]
    assert token_losses(judged.decoder, [([256], [])], {EOS}) == [None]
    assert token_losses(judged.decoder, [], {EOS}) == []


@pytest.mark.parametrize("variant", ["gqa", "biases", "rope-llama3"])
def test_full_depth_greedy_answers_have_no_strict_loss(variant: str, tiny_decoder: Callable[..., Decoder]) -> None:
    loop = Loop(tiny_decoder(variant), strategy="full")
    sequences = [sequence(str(i), prompt, 20) for i, prompt in enumerate(PROMPTS)]
    loop.run(sequences)
    answers = [(s.tokens[: s.prompt_tokens], s.generated) for s in sequences]
    found = token_losses(loop.decoder, answers, ())
    assert found == [PromptLoss(0.0, 0.0, 20)] * len(PROMPTS)


def test_early_exits_lose_what_the_plain_model_says(
    tiny_decoder: Callable[..., Decoder], plain: Callable[[str], PlainLlama]
) -> None:
    decoder, depths = tiny_decoder("gqa"), [6, 2, 6, 4, 2, 6, 6, 4]
    script = by_schedule({"a": depths})
    loop = Loop(decoder, script.exits(decoder, [2, 4]), script)
    early = sequence("a", PROMPTS[0], len(depths))
    loop.run([early])
    expected = gaps(plain("gqa"), PROMPTS[0], early.generated)
    [found] = losses(decoder, [(PROMPTS[0], early.generated)])
    assert found == PromptLoss(float((expected > 0.05).mean()), float((expected > 0).mean()), len(depths))
    assert found.strict_loss > 0, "shallow tokens of a random model differ"


def test_a_model_that_gives_nan_agrees_with_nothing(tiny_model: Callable[[str], Path]) -> None:
    decoder = load_decoder(tiny_model("gqa"))
    decoder.weights.lm_head.fill_(math.nan)
    assert losses(decoder, [([256, 5], [0, 3])], tie=0.99)[0].loss == 1


def test_bfloat16_logits_are_judged_in_float32() -> None:
    logits = torch.tensor([[0.0, -0.1015625]], dtype=torch.bfloat16)  # a gap of 0.0507; 0.0488 after bfloat16 rounding
    for tie, differs in ((0.0506, True), (0.0508, False)):
        assert loss_module._judge(logit_stats, logits, torch.tensor([1]), tie).tolist() == [[differs, True]]


@pytest.mark.parametrize("tie", [-0.01, 1.0, math.nan])
def test_a_tie_is_a_gap_of_probabilities(judged: Judged, tie: float) -> None:
    with pytest.raises(ConfigError, match=r"tie is .*; it is a gap between probabilities, so give a number in 0 … 1"):
        token_losses(judged.decoder, judged.answers, {EOS}, tie)
