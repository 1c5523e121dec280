"""Prompt files and answer lines: JSON Lines in, JSON Lines out. A bad line is its own error; the others run.

Lines of OpenAI batch files may be among them; see `eeinfer.engine.openai_batch`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

from eeinfer.config.suggest import did_you_mean
from eeinfer.core.request import BatchCall, FinishReason, Request, RequestOutput, SamplingParams
from eeinfer.core.unique_keys import RepeatedKeyError, unique_keys
from eeinfer.engine.answer_parts import exit_summary, logprob_entries, token_entries, usage
from eeinfer.engine.openai_batch import answer_line, called, failure_line, is_batch_line, prompt_fields
from eeinfer.errors import EeinferError, RequestError

PACKAGED_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"

ROLES = ("system", "user", "assistant")
MAX_SEED = 2**63 - 1
MAX_LINE_BYTES = 8 * 2**20  # more text than any model's context holds


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that is no request: its number (from 1), its id (`line-N` when unknown), and what to change.

    `call` is the OpenAI call that it is meant as, if it is.
    """

    line: int
    id: str
    message: str
    call: BatchCall | None = None


def read_prompt_file(
    source: Path | BinaryIO, *, limit: int | None = None, model: str | None = None
) -> list[Request | LineError]:
    """The requests of a JSONL file in order, with a LineError in the place of each bad line. Skips blank lines.

    Args:
        source: a file, or an open binary stream such as `sys.stdin.buffer`.
        limit: stop after this many requests and bad lines.
        model: the one that runs, which lines of OpenAI batch files must ask for; None: they may ask for any.

    Raises:
        EeinferError: the file is missing, a folder, unreadable, UTF-16, or holds no line at all.
    """
    name = str(source) if isinstance(source, Path) else "standard input"
    try:
        if isinstance(source, Path):
            with source.open("rb") as lines:
                entries = list(islice(_entries(lines, name, model), limit))
        else:
            entries = list(islice(_entries(source, name, model), limit))
    except OSError as error:
        raise EeinferError(f"{name}: cannot read prompts: {error.strerror}") from None
    if not entries:
        raise EeinferError(f'{name}: no prompts; write one JSON object a line, such as {{"prompt": "Hello"}}')
    return entries


def output_line(
    output: RequestOutput,
    *,
    exits: bool,
    token_details: bool,
    line_number: int | None = None,
    call: BatchCall | None = None,
) -> dict[str, Any]:
    """The answer to one request as a JSON object.

    Args:
        output: the answer.
        exits: whether exits are on, so that depth is worth a word.
        token_details: adds one entry a token.
        line_number: of the prompt, told when it failed.
        call: the OpenAI call that it answers, in the shape of which it is told.
    """
    if call is not None:
        return answer_line(output, call, exits=exits, token_details=token_details)
    if output.finish_reason is FinishReason.ERROR:
        place = {} if line_number is None else {"line": line_number}
        return {"id": output.id, **place, "error": output.error}
    ends = [{"text": one.text, "finish_reason": one.finish_reason.value} for one in output.sequences]
    details = [_details(one, token_details=token_details) for one in output.sequences]
    summary = exit_summary(output) if exits else None
    shared = {"usage": usage(output), **({"exits": summary} if summary else {})}
    if not output.outputs:
        return {"id": output.id, **ends[0], **shared, **details[0]}
    outputs = [{"index": i, **end, **detail} for i, (end, detail) in enumerate(zip(ends, details, strict=True))]
    return {"id": output.id, "outputs": outputs, **shared}


def _details(output: RequestOutput, *, token_details: bool) -> dict[str, Any]:
    told = logprob_entries(output.tokens)
    return {
        **({} if told is None else {"logprobs": told}),
        **({"tokens": token_entries(output.tokens)} if token_details else {}),
    }


def error_line(error: LineError) -> dict[str, Any]:
    """A bad line as a JSON object."""
    if error.call is not None:
        return failure_line(error.id, error.message, status=400)
    return {"id": error.id, "line": error.line, "error": error.message}


def _entries(stream: BinaryIO, name: str, model: str | None) -> Iterator[Request | LineError]:
    seen: dict[str, int] = {}
    for number in count(1):
        raw, whole = _read_line(stream)
        if not raw:
            return
        if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise EeinferError(f"{name}: this is UTF-16; save it as UTF-8")
        raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw  # a byte order mark
        if not whole:
            why = f"the line has more than {MAX_LINE_BYTES:,} bytes; is a line break missing? Else shorten the prompt"
            yield LineError(number, f"line-{number}", f"line {number}: {why}")
        elif raw.strip():
            yield _entry(raw.rstrip(), number, seen, model)


def _read_line(stream: BinaryIO) -> tuple[bytes, bool]:
    """The next line and whether that is all of it; of a longer one the beginning, so that no line fills the memory."""
    raw = stream.readline(MAX_LINE_BYTES)
    if len(raw) < MAX_LINE_BYTES or raw.endswith(b"\n"):
        return raw, True
    while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass
    return raw, False


def _entry(raw: bytes, number: int, seen: dict[str, int], model: str | None) -> Request | LineError:
    request_id, call = f"line-{number}", None
    try:
        fields = _parse(raw)
        if is_batch_line(fields):
            call = called(fields, model)
        request_id = _request_id(fields.get("custom_id" if call else "id"), request_id)
        _check_unique(request_id, seen)
        seen[request_id] = number
        return _request(prompt_fields(fields, model) if call else fields, request_id, number, call)
    except RequestError as error:
        return LineError(number, request_id, f"line {number}: {error}", call)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON at column {error.colno}: {error.msg}; write one whole object a line") from None
    except RecursionError:
        raise RequestError("nested too deeply; a prompt line is a flat object") from None
    except RepeatedKeyError as error:
        raise RequestError(f"field {error.key!r} occurs twice; keep one of them") from None
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError(f"not JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f'expected an object such as {{"prompt": "Hello"}}, got {_kind(fields)}')
    return fields


def _request_id(value: object, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RequestError(f"id must be text or an integer, got {_kind(value)}")
    return _text(str(value), "id")


def _check_unique(request_id: str, seen: Mapping[str, int]) -> None:
    if request_id in seen:
        raise RequestError(f"id {request_id!r} is already that of line {seen[request_id]}; give it another")


def _request(fields: Mapping[str, Any], request_id: str, number: int, call: BatchCall | None) -> Request:
    for name in fields:
        if name not in FIELDS and name not in IGNORED:
            raise RequestError(f"unknown field {name!r}{did_you_mean(name, FIELDS)}")
    prompt, messages, reference = fields.get("prompt"), fields.get("messages"), fields.get("reference")
    if (prompt is None) == (messages is None):
        raise RequestError(f"give prompt or messages, {'one of them' if prompt is None else 'not both'}")
    return Request(
        id=request_id,
        prompt=None if prompt is None else _text(prompt, "prompt"),
        messages=None if messages is None else _messages(messages),
        sampling=SamplingParams(
            **{name: read(fields.get(name)) for name, read in SAMPLING_FIELDS.items()},
            **{name: value for name in CHECKED_BY_PARAMS if (value := fields.get(name)) is not None},
        ),
        line=number,
        reference=None if reference is None else _text(reference, "reference"),
        call=call,
    )


def _messages(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise RequestError(f"messages must be a list, got {_kind(value)}")
    if not value:
        raise RequestError("messages is empty; give at least one message")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object with role and content, got {_kind(value)}")
    for name in value:
        if name not in {"role", "content"}:
            raise RequestError(f"{where}: unknown field {name!r}{did_you_mean(name, ('role', 'content'))}")
    role = _text(value.get("role"), f"{where}.role")
    if role not in ROLES:
        raise RequestError(f"{where}: unknown role {role!r}{did_you_mean(role, ROLES)}")
    return {"role": role, "content": _text(value.get("content"), f"{where}.content")}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} has half a surrogate pair at character {error.start + 1}; remove it") from None
    return value


def _integer(value: object, where: str, *, low: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{where} must be an integer >= {low}, got {_kind(value)}")
    if not low <= value <= MAX_SEED:
        raise RequestError(f"{where} must be an integer >= {low} and < 2**63, got {value}")
    return value


def _temperature(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"temperature must be a number >= 0, got {_kind(value)}")
    try:
        temperature = float(value)
    except OverflowError:
        temperature = math.inf
    if not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"temperature must be a finite number >= 0, got {value}")
    return temperature


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise RequestError(f"stop must be text or a list of texts, got {_kind(value)}")
    stop = tuple(_text(s, "stop") for s in strings)
    if "" in stop:
        raise RequestError("stop has an empty string, which would end every answer at once; remove it")
    return stop


# How fields of SamplingParams are read, by name, where it does not check all itself; None: the field is not there.
SAMPLING_FIELDS: dict[str, Callable[[object], Any]] = {
    "max_tokens": partial(_integer, where="max_tokens", low=1),
    "temperature": _temperature,
    "seed": partial(_integer, where="seed", low=0),
    "stop": _stop,
}
CHECKED_BY_PARAMS = tuple(field.name for field in fields_of(SamplingParams) if field.name not in SAMPLING_FIELDS)
FIELDS = ("prompt", "messages", "id", *SAMPLING_FIELDS, *CHECKED_BY_PARAMS, "reference")
IGNORED = ("category",)  # carried by data sets, of no use here


def _kind(value: object) -> str:
    """A JSON value in words, with its text when that is short."""
    if isinstance(value, bool | int | float) or value is None:
        return json.dumps(value)
    if isinstance(value, str):
        return "empty text" if value == "" else "text"
    return "a list" if isinstance(value, list) else "an object"
