"""How a worker talks with `compare_peers.py`: JSON objects, one a line, on standard input and standard output.

    {"load": {...}}                                     ->  {"ready": {"version", "device"}}
    {"run": {"prompts": [[ids], ...], "output_len"}}    ->  {"seconds", "decode_seconds", "token_ids"}

Workers run in the environments of their engines, so this file needs the standard library alone. The end of standard
input is the word to stop.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Answer(NamedTuple):
    """One run of a batch.

    Attributes:
        seconds: from handing over the prompts to having all answers.
        decode_seconds: the part of it after every prompt had its first token; None where that cannot be told.
        token_ids: new tokens of each prompt.
    """

    seconds: float
    decode_seconds: float | None
    token_ids: list[list[int]]


class Engine(Protocol):
    """A loaded engine."""

    version: str
    device: str

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Answer all prompts at once, greedily, `output_len` tokens each, end-of-sequence tokens ignored."""


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer messages until standard input ends.

    Args:
        load: makes the engine of the options in the first message. Libraries are best imported inside it.
    """
    reserved = os.dup(1)
    os.register_at_fork(after_in_child=lambda: os.close(reserved))  # else a child would keep the pipe open after us
    os.dup2(2, 1)  # whatever libraries print, from C++ too, goes to standard error
    with os.fdopen(reserved, "w", encoding="utf-8") as replies:

        def reply(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        engine = load(json.loads(sys.stdin.readline())["load"])
        reply({"ready": {"version": engine.version, "device": engine.device}})
        for line in sys.stdin:
            asked = json.loads(line)["run"]
            reply(engine.run(asked["prompts"], asked["output_len"])._asdict())
