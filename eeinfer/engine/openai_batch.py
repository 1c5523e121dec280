"""Lines of OpenAI batch files: as the fields of a prompt line, and answers in the shape of the API's output file.

What the API has and this engine has not is an error of its line and never ignored; null is the same as absent. Beside
the API's own, a body may have the fields that vLLM adds to it. Answers have our figures under `eeinfer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from json import dumps
from time import time
from typing import Any

from eeinfer.config.suggest import did_you_mean
from eeinfer.core.request import BatchCall, FinishReason, RequestOutput, TokenLogprob, TokenRecord
from eeinfer.engine.answer_parts import exit_summary, round_logprob, token_entries, usage
from eeinfer.errors import RequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LINE = ("custom_id", "method", "url", "body")
_SAMPLING = ("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
# Of vLLM: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, "extra parameters".
_EXTRA = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
_COMMON = ("max_tokens", *_SAMPLING, *_EXTRA, "include_stop_str_in_output")
_BODY = {
    CHAT: ("model", "messages", "max_completion_tokens", *_COMMON, "logprobs", "top_logprobs"),
    COMPLETIONS: ("model", "prompt", *_COMMON, "logprobs"),
}
# What asks for nothing that is not done anyway.
_NEUTRAL: dict[str, Any] = {
    "stream": False,
    "store": False,
    "echo": False,
    "best_of": 1,
    "response_format": {"type": "text"},
}


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Whether a JSON object is meant as a line of an OpenAI batch file."""
    return "custom_id" in fields or "body" in fields


def called(line: Mapping[str, Any], model: str | None) -> BatchCall:
    """What a line calls, as far as it says; `model` is the one that runs."""
    url, body = line.get("url"), line.get("body")
    asked = body.get("model") if isinstance(body, dict) else None
    return BatchCall(url if isinstance(url, str) else "", asked if isinstance(asked, str) else model)


def prompt_fields(line: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """The fields of a prompt line that ask the same; their values are not checked yet.

    Args:
        line: the object.
        model: the one that runs; None: any may be asked for.

    Raises:
        RequestError: the line asks for what there is not.
    """
    for name in line:
        if name not in _LINE:
            raise RequestError(f"unknown field {name!r}{did_you_mean(name, _LINE)}")
    if not isinstance(line.get("custom_id"), str):
        raise RequestError("custom_id must be text")
    if line.get("method") != "POST":
        raise RequestError('method must be "POST"')
    if line.get("url") not in tuple(_BODY):
        raise RequestError(f'url must be "{CHAT}" or "{COMPLETIONS}"')
    if not isinstance(line.get("body"), dict):
        raise RequestError("body must be an object")
    body = {name: value for name, value in line["body"].items() if value is not None}
    _check_body(body, _BODY[line["url"]], model)
    fields = {name: value for name, value in body.items() if name not in {"model", *_NEUTRAL}}
    return _chat(fields) if line["url"] == CHAT else _completion(fields)


def _check_body(body: Mapping[str, Any], known: Sequence[str], model: str | None) -> None:
    for name, value in body.items():
        if name in _NEUTRAL:
            if value != _NEUTRAL[name]:
                raise RequestError(f"body.{name} can only be {dumps(_NEUTRAL[name])} here")
        elif name not in known:
            raise RequestError(f"body: {name!r} is not supported{did_you_mean(name, known)}")
    if model is not None and body.get("model", model) != model:
        raise RequestError(f"body.model is {body['model']!r}, but {model!r} runs; name that, or pass --model")


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        raise RequestError("body.messages is missing")
    if isinstance(body["messages"], list):
        body["messages"] = [_message(message) for message in body["messages"]]
    if (limit := body.pop("max_completion_tokens", None)) is not None:
        if "max_tokens" in body:
            raise RequestError("give max_completion_tokens or max_tokens, not both")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise RequestError("max_completion_tokens must be an integer >= 1")
        body["max_tokens"] = limit
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RequestError("logprobs must be true or false; top_logprobs says how many")
    if top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true")
    return body | ({"logprobs": top or 0} if wanted else {})


def _message(message: Any) -> Any:
    """A message with its text parts as one text; what else is wrong with it is found later."""
    if not isinstance(message, dict):
        return message
    content, role = message.get("content"), message.get("role")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError('a part of a message\'s content must be {"type": "text", "text": …}')
        content = "\n".join(part["text"] for part in content)
    # What newer models call a developer has always been the system.
    return message | {"content": content, "role": "system" if role == "developer" else role}


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    if "prompt" not in body:
        raise RequestError("body.prompt is missing")
    return body


def answer_line(output: RequestOutput, call: BatchCall, *, exits: bool, token_details: bool) -> dict[str, Any]:
    """The answer to one request as a line of an output file.

    Args:
        output: the answer.
        call: what it answers.
        exits: whether exits are on, so that depth is worth a word.
        token_details: adds one entry a token.
    """
    if output.finish_reason is FinishReason.ERROR:
        # Refused before it ran, or failed while it did.
        return failure_line(output.id, output.error or "", status=500 if output.prompt_tokens else 400)
    chat = call.url == CHAT
    choice = _chat_choice if chat else _completion_choice
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{_name(output.id)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time()),
        "model": call.model,
        "choices": [
            choice(one) | ({"eeinfer": {"tokens": token_entries(one.tokens)}} if token_details else {})
            for one in output.sequences
        ],
        "usage": usage(output),
    }
    if exits and (summary := exit_summary(output)):
        body["eeinfer"] = summary
    return _line(output.id, 200, body)


def failure_line(custom_id: str, message: str, *, status: int) -> dict[str, Any]:
    """A request that was not answered; like the API, it says so in the body of the response."""
    kind = "invalid_request_error" if status < 500 else "server_error"  # noqa: PLR2004 - HTTP
    return _line(custom_id, status, {"error": {"message": message, "type": kind, "param": None, "code": None}})


def _line(custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    name = _name(custom_id)
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}


def _name(custom_id: str) -> str:
    """The same in every run, so that a run that was resumed writes what it would have written."""
    return sha256(custom_id.encode()).hexdigest()[:24]


def _chat_choice(output: RequestOutput) -> dict[str, Any]:
    told = [
        {**_chat_logprob(own[0]), "top_logprobs": [_chat_logprob(one) for one in own[1:]]}
        for token in output.tokens
        if (own := token.logprobs)
    ]
    return {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": {"content": told, "refusal": None} if told else None,
        "finish_reason": output.finish_reason.value,
    }


def _chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    whole = "\ufffd" not in one.text
    encoded = list(one.text.encode()) if whole else None
    return {"token": one.text, "logprob": round_logprob(one.logprob), "bytes": encoded}


def _completion_choice(output: RequestOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "logprobs": _completion_logprobs(output.tokens),
        "finish_reason": output.finish_reason.value,
    }


def _completion_logprobs(tokens: Sequence[TokenRecord]) -> dict[str, Any] | None:
    told = [(token.text, token.logprobs) for token in tokens if token.logprobs]
    if not told:
        return None
    return {
        "tokens": [own[0].text for _, own in told],
        "token_logprobs": [round_logprob(own[0].logprob) for _, own in told],
        # The token picked is always among them, as in the API.
        "top_logprobs": [{one.text: round_logprob(one.logprob) for one in (*own[1:], own[0])} for _, own in told],
        "text_offset": [0, *accumulate(len(text) for text, _ in told[:-1])],
    }
