"""A request's prompt as token ids."""

from __future__ import annotations

from eeinfer.core.request import Request
from eeinfer.errors import RequestError
from eeinfer.model.tokenizer import NoTokenizer, Tokenizer


def encode(request: Request, tokenizer: Tokenizer | NoTokenizer, vocab_size: int) -> list[int]:
    """Token ids of a request's prompt; never empty.

    Raises:
        RequestError: there is no prompt, or it is not usable.
    """
    if request.prompt_token_ids is not None:
        tokens = list(request.prompt_token_ids)
        if bad := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"prompt token {bad[0]} is outside the vocabulary of {vocab_size}: leave it out")
    else:
        tokens = _encode_text(request, tokenizer)
    if not tokens:
        by_template = request.messages is not None
        empty = "the chat template makes no text of these messages" if by_template else "the prompt is empty"
        raise RequestError(f"{empty}, so there is nothing to go on from: give some text")
    return tokens


def _encode_text(request: Request, tokenizer: Tokenizer | NoTokenizer) -> list[int]:
    try:
        if request.messages is not None:
            return tokenizer.encode_chat(request.messages)
        if request.prompt is not None:
            return tokenizer.encode(request.prompt)
    except TypeError:  # of the tokenizer, for text that is not Unicode; prompt files are checked when they are read
        raise RequestError("the prompt is not Unicode text (half a surrogate pair?): remove what is not") from None
    raise RequestError("the request has neither prompt nor messages: give one of them")
