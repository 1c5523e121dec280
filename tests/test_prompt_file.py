"""Prompt files: what is accepted, what each bad line is told, and the shape of the answers."""

from __future__ import annotations

import io
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eeinfer.core.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob, TokenRecord
from eeinfer.engine.prompt_file import LineError, error_line, output_line, read_prompt_file
from eeinfer.errors import EeinferError, RequestError


def read(*lines: bytes | str | dict[str, Any], limit: int | None = None) -> list[Request | LineError]:
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    return read_prompt_file(io.BytesIO(b"\n".join(raw)), limit=limit)


def only_error(line: bytes | str | dict[str, Any]) -> LineError:
    [entry] = read(line)
    assert isinstance(entry, LineError)
    assert entry.message.startswith("line 1: ")
    return entry


def test_a_full_line() -> None:
    line = {
        "prompt": "Hi",
        "id": "a",
        "max_tokens": 5,
        "temperature": 1,
        "seed": 7,
        "stop": ["x", "y"],
        "category": "greeting",
        "reference": "Hello.",
    }
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=7, stop=("x", "y"))
    assert read(line) == [Request(id="a", prompt="Hi", sampling=sampling, line=1, reference="Hello.")]
    assert read(line | {"reference": None}) == [Request(id="a", prompt="Hi", sampling=sampling, line=1)]


EXTRA = {
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.25,
    "presence_penalty": -1,
    "frequency_penalty": 2,
    "logit_bias": {"5": -100, "7": 1.5},
    "min_tokens": 3,
    "stop_token_ids": [4, 9, 4],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logprobs": 0,
    "n": 2,
}


def test_a_line_may_have_every_sampling_parameter() -> None:
    expected = SamplingParams(**EXTRA | {"logit_bias": {5: -100, 7: 1.5}, "stop_token_ids": (4, 9)})
    assert read({"prompt": "Hi", **EXTRA}) == [Request(id="line-1", prompt="Hi", sampling=expected, line=1)]
    assert read({"prompt": "Hi", **dict.fromkeys(EXTRA)}) == [Request(id="line-1", prompt="Hi", line=1)]
    assert {field.name for field in fields(SamplingParams)} == {*EXTRA, "max_tokens", "temperature", "seed", "stop"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_p", 0, "a number above 0 and up to 1"),
        ("top_p", "0.5", "a number above 0 and up to 1"),
        ("top_p", 1.01, "a number above 0 and up to 1"),
        ("top_p", float("nan"), "a number above 0 and up to 1"),
        ("top_k", -2, "an integer from 1 on, or 0 for all tokens"),
        ("top_k", 5.0, "an integer from 1 on, or 0 for all tokens"),
        ("min_p", True, "a number from 0 to 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number above 0"),
        ("repetition_penalty", 10**400, "a number above 0"),
        ("repetition_penalty", float("inf"), "a number above 0"),
        ("presence_penalty", 2.5, "a number from -2 to 2"),
        ("frequency_penalty", -2.5, "a number from -2 to 2"),
        ("min_tokens", -1, "an integer from 0 on"),
        ("logprobs", True, "an integer from 0 on, or -1 for the whole vocabulary"),
        ("logprobs", -2, "an integer from 0 on, or -1 for the whole vocabulary"),
        ("n", 0, "an integer from 1 to 16384"),
        ("n", 16385, "an integer from 1 to 16384"),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", "yes", "true or false"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", [1.0], "a list of token ids"),
        ("stop_token_ids", [-1], "a list of token ids"),
        ("logit_bias", [1], "must map token ids to numbers from -100 to 100"),
        ("logit_bias", {"a": 1}, "must map token ids to numbers from -100 to 100"),
        ("logit_bias", {"1": 100.5}, "must map token ids to numbers from -100 to 100"),
        ("logit_bias", {"1": "x"}, "must map token ids to numbers from -100 to 100"),
        ("logit_bias", {"1": 1, "01": 2}, "must map token ids to numbers from -100 to 100"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_told_its_range(name: str, value: Any, words: str) -> None:
    message = only_error(json.dumps({"prompt": "a", name: value})).message
    assert f"{name} is " in message
    assert words in message


def test_parameters_that_contradict_each_other() -> None:
    assert (
        "min_tokens is 9; it must be at most max_tokens, 8"
        in only_error({"prompt": "a", "min_tokens": 9, "max_tokens": 8}).message
    )
    assert (
        "n is 2; it must be 1 when sampling is greedy" in only_error({"prompt": "a", "n": 2, "temperature": 0}).message
    )


def test_messages_and_defaults() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert read({"messages": messages, "stop": "x", "max_tokens": None}) == [
        Request(id="line-1", messages=tuple(messages), sampling=SamplingParams(stop=("x",)), line=1)
    ]


def test_blank_lines_are_skipped_but_counted() -> None:
    entries = read("", {"prompt": "a"}, "  \t", {"prompt": "b"}, "")
    assert [entry.id for entry in entries] == ["line-2", "line-4"]


def test_byte_order_mark_and_windows_line_ends() -> None:
    entries = read_prompt_file(io.BytesIO(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b", "id": 3}\r\n'))
    assert [(entry.id, entry.prompt) for entry in entries if isinstance(entry, Request)] == [
        ("line-1", "a"),
        ("3", "b"),
    ]


def test_other_unicode_line_separators_do_not_split_a_line() -> None:
    [entry] = read('{"prompt": "a\u2028b"}')
    assert isinstance(entry, Request)
    assert entry.prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "caf\xe9"}', "not UTF-8 at byte 16; save the file as UTF-8"),
        ('{"prompt": "a"', "not JSON at column 15: Expecting ',' delimiter; write one whole object a line"),
        ("[" * 100_000, "nested too deeply; a prompt line is a flat object"),
        ('{"seed": ' + "9" * 5000 + "}", "not JSON that can be read: Exceeds the limit"),
        ('["a"]', 'expected an object such as {"prompt": "Hello"}, got a list'),
        ('"a"', "got text"),
        ("3", "got 3"),
        ({"prompt": "a", "max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ({"prompt": "a", "zzz": 3}, "unknown field 'zzz'; known: prompt, messages, id, "),
        ({"id": "a"}, "give prompt or messages, one of them"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "give prompt or messages, not both"),
        ({"prompt": 3}, "prompt must be text, got 3"),
        ({"prompt": ["a"]}, "prompt must be text, got a list"),
        ({"prompt": "\ud800"}, "prompt has half a surrogate pair at character 1; remove it"),
        ({"prompt": "a", "id": True}, "id must be text or an integer, got true"),
        ({"prompt": "a", "id": ""}, "id must be text or an integer, got empty text"),
        ({"prompt": "a", "id": 1.5}, "id must be text or an integer, got 1.5"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer >= 1 and < 2**63, got 0"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be an integer >= 1, got true"),
        ({"prompt": "a", "max_tokens": 5.0}, "max_tokens must be an integer >= 1, got 5.0"),
        ({"prompt": "a", "seed": -1}, "seed must be an integer >= 0 and < 2**63, got -1"),
        ({"prompt": "a", "seed": 2**63}, "seed must be an integer >= 0 and < 2**63"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be a finite number >= 0, got nan"),
        ({"prompt": "a", "temperature": -0.5}, "temperature must be a finite number >= 0, got -0.5"),
        ('{"prompt": "a", "temperature": 1e999}', "temperature must be a finite number >= 0, got inf"),
        ({"prompt": "a", "temperature": 10**400}, "temperature must be a finite number >= 0"),
        ({"prompt": "a", "temperature": "1"}, "temperature must be a number >= 0, got text"),
        ({"prompt": "a", "stop": ""}, "stop has an empty string, which would end every answer at once; remove it"),
        ({"prompt": "a", "stop": ["x", 3]}, "stop must be text, got 3"),
        ({"prompt": "a", "stop": {}}, "stop must be text or a list of texts, got an object"),
        ({"prompt": "a", "reference": ["b"]}, "reference must be text, got a list"),
        ({"prompt": "a", "reference": "\ud800"}, "reference has half a surrogate pair at character 1; remove it"),
        ({"prompt": "a", "referense": "b"}, "unknown field 'referense'; did you mean 'reference'?"),
        ({"messages": []}, "messages is empty; give at least one message"),
        ({"messages": "a"}, "messages must be a list, got text"),
        ({"messages": ["a"]}, "messages[0] must be an object with role and content, got text"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "messages[0]: unknown role 'usr'; did you mean 'user'?"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be text, got null"),
        (
            {"messages": [{"role": "user", "contents": "a"}]},
            "messages[0]: unknown field 'contents'; did you mean 'content'?",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) and len(value) < 100 else None,
)
def test_a_bad_line_says_what_and_how_to_mend_it(line: bytes | str | dict[str, Any], message: str) -> None:
    assert message in only_error(line).message


def test_a_bad_line_is_its_own_error_and_the_others_are_read() -> None:
    entries = read(
        {"prompt": "a", "id": "x"}, "{", {"prompt": "b", "id": "x"}, {"prompt": 3, "id": "y"}, {"prompt": "c"}
    )
    assert [type(entry) for entry in entries] == [Request, LineError, LineError, LineError, Request]
    assert [entry.id for entry in entries] == ["x", "line-2", "x", "y", "line-5"]
    repeated = entries[2]
    assert isinstance(repeated, LineError)
    assert repeated.message == "line 3: id 'x' is already that of line 1; give it another"
    assert error_line(repeated) == {"id": "x", "line": 3, "error": repeated.message}


def test_a_limit_reads_no_further() -> None:
    stream = io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    assert len(read_prompt_file(stream, limit=2)) == 2
    assert stream.readline() == b'{"prompt": "c"}\n'


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(EeinferError, match=r"empty\.jsonl: no prompts; write one JSON object a line"):
        read_prompt_file(path)


def test_a_missing_file_a_folder_and_utf16_are_errors(tmp_path: Path) -> None:
    with pytest.raises(EeinferError, match=r"none\.jsonl: cannot read prompts: No such file"):
        read_prompt_file(tmp_path / "none.jsonl")
    with pytest.raises(EeinferError, match="cannot read prompts: Is a directory"):
        read_prompt_file(tmp_path)
    path = tmp_path / "wide.jsonl"
    path.write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    with pytest.raises(EeinferError, match="UTF-16; save it as UTF-8"):
        read_prompt_file(path)


@given(st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)), min_size=1))
def test_no_bytes_make_it_fail_otherwise(lines: list[bytes]) -> None:
    try:
        entries = read_prompt_file(io.BytesIO(b"\n".join(lines)))
    except EeinferError:
        return
    assert all(isinstance(entry, Request | LineError) for entry in entries)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["prompt", "messages", "id", "max_tokens", "temperature", "seed", "stop", "reference", "category", *EXTRA]
FIELD = st.sampled_from([*FIELDS, "role"])


@given(st.dictionaries(FIELD, JSON))
def test_no_object_makes_it_fail(fields: dict[str, Any]) -> None:
    [entry] = read(fields)
    if isinstance(entry, Request):
        assert (entry.prompt is None) != (entry.messages is None)
        assert set(fields) <= set(FIELDS)


TOKENS = (TokenRecord(5, "Hel", 30, None), TokenRecord(6, "lo", 18, 0.75), TokenRecord(2, "", 18, 0.5))


def test_the_shape_of_an_answer() -> None:
    output = RequestOutput("a", "Hello", FinishReason.STOP, 4, TOKENS)
    expected = {
        "id": "a",
        "text": "Hello",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
    }
    assert output_line(output, exits=False, token_details=False) == expected
    exits = {"mean_layers": 22.0, "share": {"18": 0.6667, "30": 0.3333}}
    assert output_line(output, exits=True, token_details=False) == {**expected, "exits": exits}
    line = output_line(output, exits=True, token_details=True)
    assert line["tokens"][1] == {"token_id": 6, "text": "lo", "layers_executed": 18, "confidence": 0.75}
    assert line["tokens"][0]["confidence"] is None


def test_several_answers_and_log_probabilities() -> None:
    told = (TokenLogprob(6, -0.5, 2, "lo"), TokenLogprob(7, -0.25, 1, "l"), TokenLogprob(6, -math.inf, 2, "lo"))
    one = RequestOutput("a", "x", FinishReason.LENGTH, 4, (TokenRecord(6, "lo", 18, 0.75, told),))
    other = RequestOutput("a", "y", FinishReason.STOP, 4, (TokenRecord(5, "y", 30, None), TOKENS[2]), index=1)
    line = output_line(replace(one, outputs=(one, other)), exits=True, token_details=False)
    logprobs = [
        {
            "token_id": 6,
            "text": "lo",
            "logprob": -0.5,
            "rank": 2,
            "layers_executed": 18,
            "top_logprobs": [
                {"token_id": 7, "text": "l", "logprob": -0.25, "rank": 1},
                {"token_id": 6, "text": "lo", "logprob": -9999.0, "rank": 2},
            ],
        }
    ]
    assert line == {
        "id": "a",
        "outputs": [
            {"index": 0, "text": "x", "finish_reason": "length", "logprobs": logprobs},
            {"index": 1, "text": "y", "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
        "exits": {"mean_layers": 22.0, "share": {"18": 0.6667, "30": 0.3333}},
    }


def test_the_shape_of_a_failure() -> None:
    output = RequestOutput("a", "", FinishReason.ERROR, 0, (), "too long")
    assert output_line(output, exits=True, token_details=True) == {"id": "a", "error": "too long"}
    placed = output_line(output, exits=True, token_details=True, line_number=7)
    assert placed == {"id": "a", "line": 7, "error": "too long"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"stop": ("",)}, "stop is"),
        ({"stop": ("a", 5)}, "stop is"),
        ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
        ({"n": None}, "n is None"),
        ({"min_tokens": None}, "min_tokens is None"),
    ],
)
def test_the_python_interface_refuses_what_means_nothing(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_parameters_can_be_keys() -> None:
    assert len({SamplingParams(logit_bias={3: 1.0}), SamplingParams(logit_bias={3: 1.0}), SamplingParams(n=2)}) == 2


def test_one_stop_string_is_not_its_characters() -> None:
    assert SamplingParams(stop="xyz").stop == ("xyz",)  # type: ignore[arg-type]
