"""Figures of quality of one cell: loss, identical answers, and agreement with references where prompts carry them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING

from eeinfer.core.request import FinishReason, Request, RequestOutput

if TYPE_CHECKING:
    from eeinfer.calibration.loss import PromptLoss

_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")  # -3, 42, 1,250.00
_FINAL_ANSWER = "####"  # GSM8K writes its references so: a worked solution, then `#### 42`


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of one cell, means over prompts.

    Prompts that `full` failed to answer are left out. An answer that failed where that of `full` did not has no loss,
    and counts as wrong in the other figures.

    Attributes:
        loss, strict_loss: see `eeinfer.calibration.loss.PromptLoss`; `None` when every answer failed.
        identical: share of answers whose token ids are those of `full`.
        tie: gap in probability below which a token does not differ.
        rouge_l: ROUGE-L F1 against the references, in 0 … 1, as the `rouge-score` package computes it, unstemmed (it
            sees letters a-z and digits only); `None` without references or without the package.
        exact_match: share of answers that `matches` their references; `None` without references.
        failed: answers without a loss.
    """

    loss: float | None
    strict_loss: float | None
    identical: float
    tie: float
    rouge_l: float | None
    exact_match: float | None
    failed: int


def quality(
    requests: Sequence[Request],
    outputs: Sequence[RequestOutput],
    full: Sequence[RequestOutput],
    losses: Sequence[PromptLoss | None],
    tie: float,
) -> Quality | None:
    """The figures of a cell; `None` when `full` answered nothing.

    Args:
        requests: the prompts, some with references.
        outputs: the cell's answers, in their order.
        full: the answers of `full`, in their order.
        losses: of the cell's answers, in their order, `None` for those that failed.
        tie: with which the losses were computed.
    """
    rows = zip(requests, outputs, full, losses, strict=True)
    served = [(request, own, base, loss) for request, own, base, loss in rows if answer_ids(base)]
    if not served:
        return None
    judged = [loss for *_, loss in served if loss is not None]
    pairs = [
        (request.reference, own.text if answer_ids(own) else None)
        for request, own, *_ in served
        if request.reference is not None
    ]
    return Quality(
        loss=_mean(loss.loss for loss in judged),
        strict_loss=_mean(loss.strict_loss for loss in judged),
        identical=fmean(answer_ids(own) == answer_ids(base) for _, own, base, _ in served),
        tie=tie,
        rouge_l=_rouge_l(pairs),
        exact_match=_mean(text is not None and matches(text, reference) for reference, text in pairs),
        failed=sum(loss is None for loss in losses),
    )


def answer_ids(output: RequestOutput) -> tuple[int, ...]:
    """Token ids of an answer; none when it failed, whatever came before."""
    return () if output.finish_reason is FinishReason.ERROR else tuple(t.token_id for t in output.tokens)


def rouge_note(requests: Iterable[Request]) -> str | None:
    """Why `rouge_l` is missing, when prompts carry references and the package is not installed."""
    if find_spec("rouge_score") is not None or all(request.reference is None for request in requests):
        return None
    return 'ROUGE-L is left out: it needs the package rouge-score; pip install -e ".[bench]" in a checkout'


def matches(text: str, reference: str) -> bool:
    """Whether an answer is the reference.

    Case and white space do not count. Of a reference that ends in `#### N` (GSM8K) only the number N counts, and it is
    compared with the last number of the answer, so that "… she pays $1,250.00." matches "#### 1250".
    """
    wanted = _last_number(reference.rpartition(_FINAL_ANSWER)[2]) if _FINAL_ANSWER in reference else None
    if wanted is not None:
        return _last_number(text) == wanted
    return text.lower().split() == reference.lower().split()


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _rouge_l(pairs: Sequence[tuple[str, str | None]]) -> float | None:
    """Mean F1 over (reference, text); a failed answer scores 0."""
    score = _rouge_scorer() if pairs else None  # the package is slow to load
    return (
        None if score is None else _mean(0.0 if text is None else score(reference, text) for reference, text in pairs)
    )


def _rouge_scorer() -> Callable[[str, str], float] | None:
    """ROUGE-L F1 of (reference, text), if the package is there."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        return None
    scorer = RougeScorer(["rougeL"])
    return lambda reference, text: float(scorer.score(reference, text)["rougeL"].fmeasure)


def _mean(values: Iterable[float]) -> float | None:
    several = list(values)
    return fmean(several) if several else None
