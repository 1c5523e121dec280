"""The model's own answers, which heads are tuned on, kept on disk: a run that was killed goes on where it stopped.

A file holds the answers of one model under one set of settings, which its first line names. Each further line is an
object with the request's id, its sampling, the token ids of its prompt and of its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from eeinfer.config.load import Loaded
from eeinfer.core.request import FinishReason, Request, RequestOutput
from eeinfer.engine.encode import encode
from eeinfer.engine.llm import LLM
from eeinfer.errors import EeinferError, RequestError
from eeinfer.model.tokenizer import NoTokenizer, Tokenizer
from eeinfer.training.traces import Answered, note_failures

_Key = tuple[str, ...]


def full_depth(loaded: Loaded) -> Loaded:
    """The settings, with every token at full depth."""
    settings = loaded.settings
    return replace(loaded, settings=replace(settings, batching=replace(settings.batching, strategy="full")))


def digest(value: object) -> str:
    """16 hex digits that name a file after what it holds; `value` is anything JSON can write."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def encoded(
    requests: Sequence[Request],
    tokenizer: Tokenizer | NoTokenizer,
    vocab_size: int,
    note: Callable[[str], None],
) -> list[Request]:
    """Requests with their prompts as token ids; those that have none are left out, and `note` hears of them."""
    found, failures = [], []
    for request in requests:
        try:
            tokens = tuple(encode(request, tokenizer, vocab_size))
        except RequestError as error:
            failures.append((request.id, str(error)))
            continue
        found.append(replace(request, prompt=None, messages=None, prompt_token_ids=tokens))
    note_failures(failures, note)
    return found


def cached_answers(
    requests: Sequence[Request],
    work: Path,
    made_by: Mapping[str, Any],
    make_llm: Callable[[], LLM],
    note: Callable[[str], None],
) -> list[Answered]:
    """Answers to all requests that can be served, in their order; only those that `work` does not hold are made.

    Args:
        requests: with `prompt_token_ids`.
        work: folder of the cache, which exists. The file in it is named after `made_by`.
        made_by: what answers depend on beside the request: model, number type, sampling.
        make_llm: called when an answer is missing.
        note: called with one-line notices.

    Raises:
        EeinferError: the file cannot be read or written.
    """
    path = work / f"answers-{digest(dict(made_by))}.jsonl"
    try:
        with path.open("a+", encoding="utf-8", errors="replace") as file:
            known = _read(file, dict(made_by))
            missing = [request for request in requests if _key(request) not in known]
            if missing:
                note(f"{len(requests) - len(missing)} of {len(requests)} answers are in {path}; making the others")
                _make(make_llm(), missing, known, file, note)
    except OSError as error:
        raise EeinferError(f"{path}: {error.strerror or error}; name another folder with --work") from None
    return [_answered(request, known[_key(request)]) for request in requests if _key(request) in known]


def _answered(request: Request, answer: Sequence[int]) -> Answered:
    prompt = request.prompt_token_ids or ()
    # The last generated token predicts nothing that was kept.
    return Answered(request.id, (*prompt, *answer[:-1]), len(prompt) - 1)


def _key(request: Request) -> _Key:
    return (request.id, json.dumps(astuple(request.sampling)), json.dumps(request.prompt_token_ids))


def _read(file: TextIO, made_by: dict[str, Any]) -> dict[_Key, list[int]]:
    """The answers in a file, which is left ready for more: a last line that was cut off by a kill is removed."""
    file.seek(0)
    text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        file.truncate(len(whole.encode()))
        file.seek(0, 2)
    lines = whole.splitlines()
    if not lines:
        file.write(json.dumps({"made_by": made_by}) + "\n")
        file.flush()
        return {}
    known: dict[_Key, list[int]] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            entry = json.loads(line)
            key = (entry["id"], json.dumps(entry["sampling"]), json.dumps(entry["prompt"]))
            known[key] = [int(token) for token in entry["answer"]]
        except (ValueError, KeyError, TypeError):
            raise EeinferError(f"{file.name}, line {number}: this is no answer; remove the line or the file") from None
    return known


def _make(
    llm: LLM, missing: Sequence[Request], known: dict[_Key, list[int]], file: TextIO, note: Callable[[str], None]
) -> None:
    """Answer, and write each answer as soon as it is complete."""
    by_id = {request.id: request for request in missing}
    done = 0

    def keep(output: RequestOutput) -> None:
        nonlocal done
        done += 1
        if output.finish_reason is not FinishReason.ERROR:
            request, answer = by_id[output.id], [token.token_id for token in output.tokens]
            entry = {"id": request.id, "sampling": astuple(request.sampling), "prompt": request.prompt_token_ids}
            file.write(json.dumps(entry | {"answer": answer}) + "\n")
            file.flush()
            known[_key(request)] = answer
        if done * 10 // len(missing) > (done - 1) * 10 // len(missing):
            note(f"answered {done} of {len(missing)} prompts, {llm.stats.tokens_per_second:.0f} tokens/s")

    llm.generate(missing, on_output=keep)
