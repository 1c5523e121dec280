"""What the lines of all kinds of answers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eeinfer.core.request import Guarantee, RequestOutput, TokenLogprob, TokenRecord


def usage(output: RequestOutput) -> dict[str, int]:
    """Tokens of the prompt and of all answers to it."""
    completion = sum(len(one.tokens) for one in output.sequences)
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": output.prompt_tokens + completion,
    }


def exit_summary(output: RequestOutput) -> dict[str, Any] | None:
    """Where the tokens left, and what the calibration in use says of it; None without tokens."""
    if output.mean_layers is None:
        return None
    shares = {str(depth): round(share, 4) for depth, share in output.exit_shares.items()}
    return {"mean_layers": round(output.mean_layers, 3), "share": shares, **_certified(output.certified)}


def token_entries(tokens: Sequence[TokenRecord]) -> list[dict[str, Any]]:
    """One entry a token."""
    return [
        {"token_id": t.token_id, "text": t.text, "layers_executed": t.layers_executed, "confidence": t.confidence}
        for t in tokens
    ]


def logprob_entries(tokens: Sequence[TokenRecord]) -> list[dict[str, Any]] | None:
    """One entry a token, with the depth whose logits it speaks of; None where nobody asked."""
    if not any(token.logprobs for token in tokens):
        return None
    return [
        {
            **_logprob(own[0]),
            "layers_executed": token.layers_executed,
            "top_logprobs": [_logprob(one) for one in own[1:]],
        }
        for token in tokens
        if (own := token.logprobs)
    ]


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return {"token_id": one.token_id, "text": one.text, "logprob": round_logprob(one.logprob), "rank": one.rank}


def round_logprob(logprob: float) -> float:
    """As JSON can hold it: a token without probability has -9999, as in the OpenAI interface."""
    return round(max(logprob, -9999.0), 6)


def _certified(certified: Guarantee | str | None) -> dict[str, Any]:
    if certified is None:
        return {}
    if isinstance(certified, str):
        return {"certified": False, "reason": certified}
    return {"certified": {"tolerance": certified.tolerance, "confidence": certified.confidence}}
