"""Quality of a cell: what counts for which figure, failed answers, references."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from eeinfer.bench.quality import answer_ids, matches, quality, rouge_note
from eeinfer.calibration.loss import PromptLoss
from eeinfer.core.request import FinishReason, Request, RequestOutput, TokenRecord


def output(name: str, text: str, *ids: int, reason: FinishReason = FinishReason.STOP) -> RequestOutput:
    return RequestOutput(name, text, reason, 3, tuple(TokenRecord(i, "", 6, None) for i in ids))


def failed(name: str) -> RequestOutput:
    return output(name, "two", 7, reason=FinishReason.ERROR)  # text that would match a reference


PLAIN = [Request("a", prompt="x"), Request("b", prompt="x"), Request("c", prompt="x")]
FULL = [output("a", "one", 1, 2), output("b", "two", 3), output("c", "three", 4, 5, 6, 7)]


def test_losses_are_means_over_prompts_not_tokens() -> None:
    losses = [PromptLoss(0.5, 1.0, 2), PromptLoss(0.0, 0.0, 1), PromptLoss(0.25, 0.5, 400)]
    found = quality(PLAIN, FULL, FULL, losses, 0.05)
    assert found is not None
    assert json.loads(json.dumps(asdict(found))) == {
        "loss": 0.25,
        "strict_loss": 0.5,
        "identical": 1.0,
        "tie": 0.05,
        "rouge_l": None,
        "exact_match": None,
        "failed": 0,
    }


def test_identical_compares_token_ids_not_text() -> None:
    own = [output("a", "one", 1, 9), output("b", "another text", 3), output("c", "three", 4, 5, 6)]
    found = quality(PLAIN, own, FULL, [PromptLoss(0.0, 0.0, 1)] * 3, 0.1)
    assert found is not None
    assert found.identical == pytest.approx(1 / 3)
    assert found.tie == 0.1


def test_an_answer_that_failed_has_no_loss_and_is_wrong_elsewhere() -> None:
    requests = [Request("a", prompt="x", reference="one"), Request("b", prompt="x", reference="two"), PLAIN[2]]
    own = [FULL[0], failed("b"), FULL[2]]
    found = quality(requests, own, FULL, [PromptLoss(0.5, 0.5, 2), None, PromptLoss(0.0, 0.0, 4)], 0.05)
    assert found is not None
    assert (found.loss, found.failed) == (0.25, 1)
    assert found.identical == pytest.approx(2 / 3)
    assert (found.exact_match, found.rouge_l) == (0.5, 0.5)


def test_prompts_that_full_cannot_answer_are_left_out() -> None:
    requests = [Request("a", prompt="x", reference="one"), Request("b", prompt="x", reference="two")]
    full, losses = [FULL[0], failed("b")], [PromptLoss(0.5, 0.5, 2), PromptLoss(1.0, 1.0, 1)]
    found = quality(requests, FULL[:2], full, losses, 0.05)
    assert found is not None
    assert (found.loss, found.identical, found.exact_match, found.failed) == (0.5, 1.0, 1.0, 0)
    assert quality(requests, FULL[:2], [failed("a"), failed("b")], losses, 0.05) is None


def test_nothing_but_failures_has_no_loss() -> None:
    found = quality(PLAIN, [failed(r.id) for r in PLAIN], FULL, [None] * 3, 0.05)
    assert found is not None
    assert (found.loss, found.strict_loss, found.identical, found.failed) == (None, None, 0.0, 3)


def test_a_failed_answer_has_no_ids() -> None:
    assert answer_ids(failed("a")) == ()
    assert answer_ids(FULL[0]) == (1, 2)


def test_rouge_l_by_hand() -> None:
    # Longest common subsequence "the cat sat": 3 of 4 words of the answer, 3 of 6 of the reference.
    requests = [Request("a", prompt="x", reference="The cat sat on the mat."), PLAIN[1]]
    own = [output("a", "the black CAT sat", 1), FULL[1]]
    found = quality(requests, own, FULL[:2], [PromptLoss(0.0, 0.0, 1)] * 2, 0.05)
    assert found is not None
    assert found.rouge_l == pytest.approx(2 * 0.75 * 0.5 / (0.75 + 0.5))
    assert found.exact_match == 0.0


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("  Paris\n is big", "paris is  BIG ", True),
        ("Paris is big.", "Paris is big", False),
        ("So she pays $1,250.00.", "5 * 250 = <<5*250=1250>>1250\n#### 1250", True),
        ("#### 1,250", "#### 1250", True),
        ("She has 3 left, of 10-7", "#### 7", True),
        ("The result is -4", "#### -4", True),
        ("The result is -4", "#### 4", False),
        ("It is COVID-19", "#### 19", True),
        ("She counts 1,2,3", "#### 3", True),
        ("1250 dollars for 2 cows", "#### 1250", False),
        ("12.5", "#### 125", False),
        ("twelve", "#### 12", False),
        ("#### None", "#### none", True),
        ("", "", True),
    ],
)
def test_exact_match(text: str, reference: str, *, expected: bool) -> None:
    assert matches(text, reference) is expected


def test_without_the_package_there_is_a_note_and_no_rouge(monkeypatch: pytest.MonkeyPatch) -> None:
    with_reference = [Request("a", prompt="x", reference="one")]
    assert rouge_note(with_reference) is None
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    assert 'pip install -e ".[bench]"' in str(rouge_note(with_reference))
    assert rouge_note(PLAIN) is None, "nothing is missing where no prompt has a reference"
    found = quality(with_reference, FULL[:1], FULL[:1], [PromptLoss(0.0, 0.0, 2)], 0.05)
    assert found is not None
    assert (found.rouge_l, found.exact_match) == (None, 1.0)


def test_the_module_brings_in_nothing_heavy() -> None:
    program = "import sys, eeinfer.bench.quality\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "rouge_score", "numpy"} & set(ended.stdout.split()) == set()
