"""OpenAI batch files: which lines are taken, what the others are told, and the shape of the answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, Run, runner
from hypothesis import given, settings
from hypothesis import strategies as st

from eeinfer import LLM
from eeinfer.core.request import BatchCall, FinishReason, Request, RequestOutput, SamplingParams
from eeinfer.engine.openai_batch import CHAT, COMPLETIONS
from eeinfer.engine.prompt_file import LineError, error_line, output_line, read_prompt_file

USER = {"role": "user", "content": "Hi"}
CHAT_BODY = {"model": "m", "messages": [USER]}


def call(body: Any, url: str = CHAT, **changes: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **changes}


def read(*lines: dict[str, Any], model: str | None = "m") -> list[Request | LineError]:
    return read_prompt_file(io.BytesIO("\n".join(map(json.dumps, lines)).encode()), model=model)


def one(line: dict[str, Any], **options: Any) -> Request:
    [entry] = read(line, **options)
    assert isinstance(entry, Request), entry
    return entry


def refused(line: dict[str, Any]) -> str:
    [entry] = read(line)
    assert isinstance(entry, LineError), entry
    assert entry.call is not None
    assert error_line(entry)["response"]["status_code"] == 400
    return entry.message.removeprefix("line 1: ")


# In


def test_a_chat_line_with_everything() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
            USER,
        ],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["x"],
        "seed": 3,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"7": -100},
        "logprobs": True,
        "top_logprobs": 4,
        "top_k": 3,
        "min_tokens": 2,
        "stream": False,
        "response_format": {"type": "text"},
        "tools": None,
    }
    sampling = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop=("x",),
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={7: -100},
        logprobs=4,
        top_k=3,
        min_tokens=2,
    )
    messages = ({"role": "system", "content": "Be\nbrief"}, USER)
    expected = Request("a", messages=messages, sampling=sampling, line=1, call=BatchCall(CHAT, "m"))
    assert one(call(body)) == expected


def test_a_completions_line() -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "logprobs": 2, "echo": False, "best_of": 1}
    expected = Request(
        "a", prompt="Hi", sampling=SamplingParams(max_tokens=5, logprobs=2), line=1, call=BatchCall(COMPLETIONS, "m")
    )
    assert one(call(body, COMPLETIONS)) == expected


def test_log_probabilities_of_chat() -> None:
    assert one(call(CHAT_BODY | {"logprobs": True})).sampling.logprobs == 0
    assert one(call(CHAT_BODY | {"logprobs": False})).sampling.logprobs is None


def test_any_model_may_be_asked_for_where_none_is_said_to_run() -> None:
    asked = one(call(CHAT_BODY | {"model": "other"}), model=None)
    assert asked.call == BatchCall(CHAT, "other")


def test_lines_of_both_kinds_share_a_file_and_its_ids() -> None:
    entries = read(call(CHAT_BODY), {"prompt": "Hi", "id": "b"}, call(CHAT_BODY, custom_id="b"), {"prompt": "x"})
    assert [entry.id for entry in entries] == ["a", "b", "b", "line-4"]
    assert isinstance(entries[2], LineError)
    assert entries[2].message == "line 3: id 'b' is already that of line 2; give it another"
    assert error_line(entries[2])["custom_id"] == "b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (call(CHAT_BODY, custom_id=5), "custom_id must be text"),
        ({"body": CHAT_BODY, "method": "POST", "url": CHAT}, "custom_id must be text"),
        (call(CHAT_BODY, method="GET"), 'method must be "POST"'),
        (call(CHAT_BODY, url="/v1/embeddings"), 'url must be "/v1/chat/completions" or "/v1/completions"'),
        (call(CHAT_BODY, url=[1]), 'url must be "/v1/chat/completions" or "/v1/completions"'),
        (call("Hi"), "body must be an object"),
        (call(CHAT_BODY, priority=1), "unknown field 'priority'; known: custom_id, method, url, body"),
        (call({"model": "m"}), "body.messages is missing"),
        (call({"model": "m"}, COMPLETIONS), "body.prompt is missing"),
        (call({"prompt": ["a", "b"]}, COMPLETIONS), "prompt must be text, got a list"),
        (call(CHAT_BODY | {"model": "gpt"}), "body.model is 'gpt', but 'm' runs; name that, or pass --model"),
        (call(CHAT_BODY | {"tools": []}), "body: 'tools' is not supported"),
        (call(CHAT_BODY | {"user": "me"}), "body: 'user' is not supported; known: model, messages, "),
        (call(CHAT_BODY | {"max_token": 3}), "body: 'max_token' is not supported; did you mean 'max_tokens'?"),
        (call(CHAT_BODY | {"prompt": "a"}), "body: 'prompt' is not supported"),
        (call(CHAT_BODY | {"\ud800": 1}), r"body: '\ud800' is not supported"),
        (call(CHAT_BODY | {"stream": True}), "body.stream can only be false here"),
        (
            call(CHAT_BODY | {"response_format": {"type": "json_object"}}),
            'body.response_format can only be {"type": "text"}',
        ),
        (
            call(CHAT_BODY | {"max_tokens": 3, "max_completion_tokens": 3}),
            "give max_completion_tokens or max_tokens, not",
        ),
        (call(CHAT_BODY | {"max_completion_tokens": 0}), "max_completion_tokens must be an integer >= 1"),
        (call(CHAT_BODY | {"max_completion_tokens": True}), "max_completion_tokens must be an integer >= 1"),
        (call(CHAT_BODY | {"logprobs": 3}), "logprobs must be true or false; top_logprobs says how many"),
        (call(CHAT_BODY | {"top_logprobs": 3}), "top_logprobs needs logprobs: true"),
        (call({"prompt": "a", "logprobs": True}, COMPLETIONS), "logprobs is True; it must be an integer"),
        (
            call({"prompt": "a", "max_completion_tokens": 5}, COMPLETIONS),
            "body: 'max_completion_tokens' is not supported",
        ),
        (call(CHAT_BODY | {"top_p": 0}), "top_p is 0; it must be a number above 0 and up to 1"),
        (call(CHAT_BODY | {"temperature": "1"}), "temperature must be a number >= 0, got text"),
        (call({"messages": [{"role": "tool", "content": "x"}]}), "messages[0]: unknown role 'tool'"),
        (call({"messages": [USER | {"name": "me"}]}), "messages[0]: unknown field 'name'"),
        (call({"messages": "Hi"}), "messages must be a list, got text"),
        (
            call({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "a part of a message's content must be",
        ),
    ],
)
def test_what_is_not_supported_is_an_error_of_its_line(line: dict[str, Any], message: str) -> None:
    assert message in refused(line)
    json.dumps(error_line(read(line)[0]), ensure_ascii=False).encode()  # as answers are written


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["model", "messages", "prompt", "n", "logprobs", "top_logprobs", "stream", "stop", "best_of", "seed"]
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([CHAT, COMPLETIONS]), JSON | st.dictionaries(NAMES, JSON, max_size=4), JSON)
def test_no_line_makes_it_fail_otherwise(url: str, body: Any, odd: Any) -> None:
    entries = read(call(body, url), call({"messages": odd}, custom_id="b"), call(CHAT_BODY, odd, custom_id="c"))
    assert all(entry.call is not None for entry in entries)


# Out


def test_answers_of_a_model(make_llm: Callable[..., LLM]) -> None:
    """Both endpoints through a tiny model: texts, log-probabilities, several choices, usage and our own figures."""
    chat = call(
        CHAT_BODY | {"max_tokens": 4, "n": 2, "temperature": 1.5, "seed": 1, "logprobs": True, "top_logprobs": 2}
    )
    text = call({"prompt": "ab", "max_tokens": 3, "logprobs": 1}, COMPLETIONS, custom_id="b")
    long = call({"prompt": "ab", "max_tokens": 3000}, COMPLETIONS, custom_id="c")
    requests = [entry for entry in read(chat, text, long) if isinstance(entry, Request)]
    outputs = make_llm(exits=[2], threshold=float("-inf")).generate(requests)
    first, second, third = (
        output_line(output, exits=True, token_details=True, call=request.call)
        for output, request in zip(outputs, requests, strict=True)
    )
    assert (first["custom_id"], first["error"], first["response"]["status_code"]) == ("a", None, 200)
    assert first["id"].startswith("batch_req_")
    body = first["response"]["body"]
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "m", "chatcmpl-")
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice, answer in zip(body["choices"], outputs[0].outputs, strict=True):
        assert choice["message"] == {"role": "assistant", "content": answer.text, "refusal": None}
        assert choice["finish_reason"] == answer.finish_reason.value
        assert len(choice["logprobs"]["content"]) == len(answer.tokens)
        assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
        depths = [token["layers_executed"] for token in choice["eeinfer"]["tokens"]]
        assert depths == [6, *[2] * (len(answer.tokens) - 1)]
    generated = sum(len(answer.tokens) for answer in outputs[0].outputs)
    prompt = outputs[0].prompt_tokens
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    assert set(body["eeinfer"]) == {"mean_layers", "share"}

    body = second["response"]["body"]
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    [choice] = body["choices"]
    assert choice["text"] == outputs[1].text
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {3}
    pieces = [token.text for token in outputs[1].tokens]
    assert logprobs["text_offset"] == [len("".join(pieces[:i])) for i in range(3)]
    assert all(
        own in top.values() for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )

    assert third["response"]["status_code"] == 400
    error = third["response"]["body"]["error"]
    assert error["type"] == "invalid_request_error"
    assert "max_tokens can be at most" in error["message"]
    for line in (first, second, third):
        json.dumps(line, allow_nan=False)


def test_a_request_that_failed_while_it_ran_is_a_server_error() -> None:
    output = RequestOutput("a", "", FinishReason.ERROR, 3, (), "not finite")
    line = output_line(output, exits=True, token_details=False, call=BatchCall(CHAT, "m"))
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["type"] == "server_error"


def test_without_logprobs_and_exits_nothing_is_said_of_them() -> None:
    output = RequestOutput("a", "Hi", FinishReason.STOP, 3, ())
    for url in (CHAT, COMPLETIONS):
        body = output_line(output, exits=False, token_details=False, call=BatchCall(url, "m"))["response"]["body"]
        assert body["choices"][0]["logprobs"] is None
        assert "eeinfer" not in {*body, *body["choices"][0]}


def test_the_command_answers_batch_lines_in_their_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run: Run = runner(monkeypatch, capsys)
    path = tmp_path / "batch.jsonl"
    lines = [
        call({"model": "my/model", "messages": [USER]}),
        call({"model": "gpt", "messages": [USER]}, custom_id="b"),
        call({"prompt": "fail"}, COMPLETIONS, custom_id="c"),
        {"prompt": "one two", "id": "d"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    ended = run("generate", "--prompts", path, "--model", "my/model")
    good, other, failed, plain = ended.lines
    assert ended.code == 1
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "Hi"
    assert good["response"]["body"]["eeinfer"]["mean_layers"] == 30.0
    assert [line["custom_id"] for line in (good, other, failed)] == ["a", "b", "c"]
    assert "'my/model' runs" in other["response"]["body"]["error"]["message"]
    assert failed["response"]["body"]["error"]["message"] == "the prompt is too long"
    assert (plain["id"], plain["text"]) == ("d", "one two")
    assert [request.id for request in FakeLLM.built[0].requests] == ["a", "c", "d"]
