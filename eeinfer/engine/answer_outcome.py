"""How a request ended, read from the line of its answer: all that is left of it when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eeinfer.core.request import FinishReason


class Outcome(NamedTuple):
    """What a line says.

    Attributes:
        id: of the request.
        error: why it has no answer; None: it has.
        finish_reasons: of its answers, `n` of them; of a request that failed one, `error`.
    """

    id: str
    error: str | None
    finish_reasons: tuple[str, ...]


def outcome_of(line: Mapping[str, Any]) -> Outcome:
    """What the line of an answer of either kind says, the house's or that of an OpenAI batch file."""
    if "custom_id" in line:
        body = line["response"]["body"]
        name, failure, answers = line["custom_id"], body.get("error"), body.get("choices", ())
        error = None if failure is None else failure["message"]
    else:
        name, error, answers = line["id"], line.get("error"), line.get("outputs", (line,))
    if error is not None:
        return Outcome(name, error, (FinishReason.ERROR.value,))
    return Outcome(name, None, tuple(answer["finish_reason"] for answer in answers))
