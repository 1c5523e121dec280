"""Prompts of a calibration: how they are split, and what keeps a certifying prompt apart from all else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from eeinfer import LLM
from eeinfer.calibration import prompts as prompts_module
from eeinfer.calibration.prompts import data_fingerprint, encoded, read_prompts, split, tuned_ids, without_tuned
from eeinfer.core.request import Request
from eeinfer.engine.prompt_id import prompt_id
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.training.prompts import held_out

Notes = list[str]


def requests(count: int, prefix: str = "p") -> list[Request]:
    return [Request(f"{prefix}{i}", prompt=f"{prefix} number {i}") for i in range(count)]


@pytest.fixture
def notes() -> Notes:
    return []


def test_the_split_is_by_id_alone(notes: Notes) -> None:
    many = requests(400)
    found = split(many, 0.25, notes.append)
    assert len(found.path) + len(found.certify) == 400
    assert 70 < len(found.path) < 130
    fewer = split(many[::-1][:300], 0.25, notes.append)
    assert {r.id for r in fewer.path} == {r.id for r in found.path} & {r.id for r in many[100:]}
    assert [r.id for r in fewer.certify] == [r.id for r in found.certify if r in many[100:]], "in one order for all"
    assert notes == []


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 7.0, float("nan")])
def test_a_share_lies_between_0_and_1(share: float, notes: Notes) -> None:
    with pytest.raises(ConfigError, match=r"--path-prompts .*: give a share between 0 and 1, such as 0\.25, or a file"):
        split(requests(9), share, notes.append)


def test_one_prompt_cannot_be_split(notes: Notes) -> None:
    with pytest.raises(EeinferError, match=r"1 prompts leave . for the path and . to certify; give more"):
        split(requests(1), 0.25, notes.append)


def test_a_certifying_prompt_takes_no_part_in_the_path_whatever_its_id(notes: Notes) -> None:
    own = [*requests(5, "q"), Request("other-name", prompt="p number 3")]
    found = split(requests(20), own, notes.append)
    assert sorted(r.id for r in found.path) == [f"q{i}" for i in range(5)]
    assert len(found.certify) == 20
    assert notes == ["1 path prompts are among the certifying ones and take no part in the path"]


def test_bad_and_repeated_lines_are_left_out(tmp_path: Path, notes: Notes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{\n{"prompt": "b"}\n{"prompt": "a", "id": "again"}\n', encoding="utf-8")
    assert [r.prompt for r in read_prompts(path, notes.append)] == ["a", "b"]
    assert notes[0].startswith("1 unusable lines are left out; the first: line 2: not JSON")
    assert notes[1] == "1 prompts stand in the file twice and count once"
    path.write_text("{\n", encoding="utf-8")
    with pytest.raises(EeinferError, match="no line of the prompts is usable"):
        read_prompts(path, notes.append)


def test_a_prompt_is_known_by_its_text() -> None:
    turns = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    assert prompt_id(Request("x", messages=turns)) == sha256(b"Be brief.\nHi").hexdigest()[:16]
    assert prompt_id(Request("y", prompt="Be brief.\nHi")) == prompt_id(Request("x", messages=turns))
    assert prompt_id(Request("x", prompt_token_ids=(1, 2))) != prompt_id(Request("x", prompt_token_ids=(1, 3)))


# Tuning data


def heads(folder: Path, made_with: object) -> Path:
    (folder / "exit_config.json").write_text(json.dumps({"made_with": made_with}), encoding="utf-8")
    return folder


def test_certifying_prompts_that_the_heads_were_tuned_on_are_refused(tmp_path: Path, notes: Notes) -> None:
    many = requests(40)
    found = split(many, 0.25, notes.append)
    overlap = [prompt_id(r) for r in found.certify[:3]]
    tuned = tuned_ids(heads(tmp_path, {"prompt_ids": overlap}), notes.append)
    with pytest.raises(EeinferError, match=r"^3 of \d+ certifying prompts are among those .* tuned on, .* or --force$"):
        without_tuned(found, tuned, notes.append, force=False)
    assert notes == []
    assert without_tuned(found, tuned, notes.append, force=True) == found
    assert notes[0].startswith("3 of ")


def test_tuned_prompts_leave_the_path_unless_there_is_nothing_else(tmp_path: Path, notes: Notes) -> None:
    found = split(requests(80), 0.25, notes.append)
    ids = [prompt_id(r) for r in found.path]
    some = without_tuned(
        found, tuned_ids(heads(tmp_path, {"prompt_ids": ids[1:]}), notes.append), notes.append, force=False
    )
    assert some.path == found.path[:1]
    every = without_tuned(
        found, tuned_ids(heads(tmp_path, {"prompt_ids": ids}), notes.append), notes.append, force=False
    )
    judging = [request for request in found.path if held_out(request.id)]
    assert judging
    assert every.path == judging, "these only judged the heads"
    without = replace(found, path=[request for request in found.path if not held_out(request.id)])
    assert without_tuned(without, ids, notes.append, force=False).path == without.path


def test_a_path_needs_no_more_than_so_many_prompts(monkeypatch: pytest.MonkeyPatch, notes: Notes) -> None:
    monkeypatch.setattr(prompts_module, "MOST_PATH_PROMPTS", 4)
    found = split(requests(40), 0.5, notes.append)
    assert without_tuned(found, (), notes.append, force=False).path == found.path[:4]


@pytest.mark.parametrize("made_with", [None, {}, {"prompt_ids": 3}])
def test_heads_that_do_not_say_are_told(made_with: object, tmp_path: Path, notes: Notes) -> None:
    assert tuned_ids(heads(tmp_path, made_with), notes.append) == set()
    assert "does not say which prompts the heads were tuned on" in notes[0]


# As token ids


def test_prompts_that_the_model_cannot_take_are_left_out(make_llm: Callable[..., LLM], notes: Notes) -> None:
    tokenizer = make_llm().engine.tokenizer
    several = [Request("a", prompt="abc"), Request("long", prompt="x" * 500), Request("empty", prompt_token_ids=())]
    [kept] = encoded([*several, Request("b", prompt="abc")], tokenizer, 272, 160, notes.append)
    assert kept.tokens == tuple(tokenizer.encode("abc"))
    size = len(tokenizer.encode("x" * 500))
    left_out = "2 prompts that the model cannot take are left out"
    assert notes == [f"{left_out}; the first: long: the prompt has {size} tokens, the model's context 160"]


def test_the_fingerprint_of_the_data_is_that_of_a_set(make_llm: Callable[..., LLM], notes: Notes) -> None:
    tokenizer = make_llm().engine.tokenizer
    known = encoded(requests(5), tokenizer, 272, 160, notes.append)
    assert data_fingerprint(known) == data_fingerprint(known[::-1])
    assert data_fingerprint(known) != data_fingerprint(known[1:])
