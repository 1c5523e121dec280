"""The prompts that ship with the package: `generate`, `bench` and calibration use them when no file is given."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from typing import Any

import pytest

CATEGORIES = {"question", "arithmetic", "instruction", "summary", "code", "dialogue"}
PREFIX = 20


@pytest.fixture(scope="module")
def raw() -> bytes:
    return (resources.files("eeinfer") / "data" / "prompts.jsonl").read_bytes()


@pytest.fixture(scope="module")
def prompts(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.decode("utf-8").splitlines()]


def test_file_is_plain_utf8_lines(raw: bytes) -> None:
    assert not raw.startswith(b"\xef\xbb\xbf")
    assert b"\r" not in raw
    assert raw.endswith(b"}\n")
    lines = raw.decode("utf-8").split("\n")[:-1]
    assert all(line.startswith("{") for line in lines)
    # U+2028 and friends would make `str.splitlines` and `split("\n")` disagree about line numbers.
    assert lines == raw.decode("utf-8").splitlines()


def test_count_and_categories(prompts: list[dict[str, Any]]) -> None:
    assert 300 <= len(prompts) <= 320
    counts = Counter(prompt["category"] for prompt in prompts)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 35, counts


def test_ids_and_contents_are_unique(prompts: list[dict[str, Any]]) -> None:
    ids = Counter(prompt["id"] for prompt in prompts)
    assert [name for name, count in ids.items() if count > 1] == []
    contents = Counter(
        " ".join(" ".join(message["content"] for message in prompt["messages"]).lower().split()) for prompt in prompts
    )
    assert [content for content, count in contents.items() if count > 1] == []


def test_every_prompt_is_well_formed(prompts: list[dict[str, Any]]) -> None:
    for prompt in prompts:
        assert set(prompt) == {"id", "category", "messages"}, prompt
        assert prompt["id"].startswith(prompt["category"] + "-"), prompt["id"]
        messages = prompt["messages"]
        assert isinstance(messages, list), prompt["id"]
        assert messages, prompt["id"]
        for message in messages:
            assert set(message) == {"role", "content"}, prompt["id"]
            assert isinstance(message["content"], str), prompt["id"]
            assert message["content"].strip(), prompt["id"]
        roles = [message["role"] for message in messages]
        # Chat templates accept one optional leading system turn, then user and assistant in alternation.
        turns = roles[1:] if roles[0] == "system" else roles
        assert len(turns) % 2 == 1, prompt["id"]
        assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))], prompt["id"]


def test_prompts_use_system_messages_and_several_turns(prompts: list[dict[str, Any]]) -> None:
    assert sum(prompt["messages"][0]["role"] == "system" for prompt in prompts) >= 5
    assert sum(len(prompt["messages"]) >= 3 for prompt in prompts if prompt["category"] == "dialogue") >= 10


def test_every_stretch_of_twenty_lines_covers_all_categories(prompts: list[dict[str, Any]]) -> None:
    """A short run on the first lines must measure the same kinds of work as a long one."""
    for start in range(len(prompts) - PREFIX + 1):
        found = {prompt["category"] for prompt in prompts[start : start + PREFIX]}
        assert found == CATEGORIES, f"lines {start + 1} to {start + PREFIX} lack {CATEGORIES - found}"
