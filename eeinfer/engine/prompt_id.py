"""What a prompt is recognised by across files: its text, not its name there."""

from __future__ import annotations

from hashlib import sha256

from eeinfer.core.request import Request


def prompt_id(request: Request) -> str:
    """The first 8 bytes of sha256 of the prompt's text, 16 hex digits.

    The text of chat turns is their contents, joined by line breaks. Token ids count as the text of their list.
    """
    if request.prompt is not None:
        text = request.prompt
    elif request.messages is not None:
        text = "\n".join(str(message["content"]) for message in request.messages)
    else:
        text = repr(list(request.prompt_token_ids or ()))
    return sha256(text.encode()).hexdigest()[:16]
