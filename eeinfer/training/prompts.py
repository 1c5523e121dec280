"""The prompts that heads are tuned on: read, split by their ids, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

from eeinfer.core.request import Request
from eeinfer.engine.prompt_file import LineError, read_prompt_file
from eeinfer.engine.prompt_id import prompt_id
from eeinfer.training.traces import Answered

DEV_SHARE = 0.1  # judges the heads, and stops their training
GATE_SHARE = 0.15  # trains the gates: on answers that the heads have not seen, as they will be served


def read_requests(prompts: Path | BinaryIO, num_prompts: int | None, note: Callable[[str], None]) -> list[Request]:
    """The usable prompts of a JSONL file or open stream; `note` hears of the others.

    Raises:
        EeinferError: the file cannot be read.
    """
    lines = read_prompt_file(prompts, limit=num_prompts)
    if bad := [line for line in lines if isinstance(line, LineError)]:
        note(f"{len(bad)} unusable lines are left out; the first: {bad[0].message}")
    return [line for line in lines if isinstance(line, Request)]


def held_out(request_id: str) -> bool:
    """A tenth of the prompts, by a hash of their id, so that the split does not depend on their order or number."""
    return _position(request_id) < DEV_SHARE


def split(answers: Sequence[Answered], *, gates: bool) -> dict[str, list[Answered]]:
    """Answers for `train`, `gate` and `dev`, by a hash of their id; without gates the second are for training too."""
    parts: dict[str, list[Answered]] = {"train": [], "gate": [], "dev": []} if gates else {"train": [], "dev": []}
    for answer in answers:
        for_gate = gates and _position(answer.id) < DEV_SHARE + GATE_SHARE
        parts["dev" if held_out(answer.id) else "gate" if for_gate else "train"].append(answer)
    return parts


def _position(request_id: str) -> float:
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big") / 2**64


def data_record(requests: Sequence[Request], answers: Sequence[Answered]) -> dict[str, object]:
    """What `exit_config.json` says of the data: their number, a fingerprint, and the id of each prompt's text."""
    by_id: Mapping[str, Request] = {request.id: request for request in requests}
    digest = sha256()
    for answer in sorted(answers, key=lambda a: a.id):
        digest.update(repr((answer.id, answer.tokens)).encode())
    return {
        "prompts": len(answers),
        "data_fingerprint": "sha256:" + digest.hexdigest(),
        "prompt_ids": sorted({prompt_id(by_id[answer.id]) for answer in answers}),
    }
