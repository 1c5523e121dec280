"""Calibration files as layers of settings, and whether what they certify holds for what runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from eeinfer import LLM, Request, SamplingParams
from eeinfer.config.load import Calibration, Loaded, load_settings
from eeinfer.core.request import Guarantee
from eeinfer.engine.certificate import Certificate, read_certificate, recorded_policy
from eeinfer.engine.prompt_file import output_line
from eeinfer.errors import ConfigError

load = partial(load_settings, environ={})

EXITS = {"layers": [2, 4], "measure": "margin", "threshold": [math.inf, 0.01], "decay": 0.0, "completion": "copy"}
TABLE = {
    "certified": True,
    "reason": "",
    "policy": "",
    "model": "sha256:m",
    "heads": "none",
    "dtype": "float64",
    "strategy": "split",
    "max_tokens": 6,
    "n": 300,
    "tie": 0.05,
    "data": "sha256:d",
    "seed": 0,
    "version": "0.1.0",
    "tolerance": 0.02,
    "confidence": 0.95,
}


def sealed(exits: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """The document of a calibration file, with the fingerprint of its own policy."""
    settings = {f"exits.{name}": tuple(v) if isinstance(v, list) else v for name, v in exits.items()}
    policy = recorded_policy(Certificate(**table), Calibration("", settings, table)).fingerprint
    return {"exits": exits, "calibration": table | {"policy": policy}}


def write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(tomli_w.dumps(document), encoding="utf-8")
    return path


# As a layer


def test_the_calibration_lies_between_the_packaged_settings_and_the_users(tmp_path: Path) -> None:
    packaged = write(tmp_path / "eeinfer.toml", {"exits": {"layers": [1, 3, 5], "threshold": [0.9, 0.8, 0.7]}})
    assert load(packaged=packaged).settings.exits.layers == (1, 3, 5)
    calibration = write(tmp_path / "calibration.toml", sealed(EXITS, TABLE))
    loaded = load(packaged=packaged)
    assert loaded.settings.exits.layers == (2, 4)
    assert loaded.settings.exits.threshold == (math.inf, 0.01)
    assert loaded.origins["exits.measure"] == f"{calibration} (calibration of the exit heads)"
    assert loaded.calibration is not None
    assert loaded.calibration.origin == loaded.origins["exits.measure"]
    user = write(tmp_path / "user.toml", {"exits": {"completion": "oracle"}})
    above = load(packaged=packaged, files=[user])
    assert (above.settings.exits.completion, above.settings.exits.measure) == ("oracle", "margin")
    assert above.calibration is not None
    assert above.calibration.settings["exits.completion"] == "copy", "its own values, whatever lies above"


def test_a_calibration_needs_no_other_file_beside_it(tmp_path: Path) -> None:
    calibration = write(tmp_path / "calibration.toml", sealed(EXITS, TABLE))
    assert load(packaged=calibration).settings.exits.threshold == (math.inf, 0.01)


def test_a_calibration_that_is_given_wins_over_the_packaged_one(tmp_path: Path) -> None:
    write(tmp_path / "calibration.toml", sealed(EXITS, TABLE))
    own = write(tmp_path / "own.toml", sealed(EXITS | {"threshold": [0.5, 0.4]}, TABLE | {"tolerance": 0.1}))
    loaded = load(packaged=tmp_path / "calibration.toml", files=[own])
    assert loaded.settings.exits.threshold == (0.5, 0.4)
    assert loaded.calibration is not None
    assert (loaded.calibration.origin, loaded.calibration.table["tolerance"]) == (str(own), 0.1)


def test_another_measure_drops_the_calibrated_thresholds(tmp_path: Path) -> None:
    calibration = write(tmp_path / "calibration.toml", sealed(EXITS, TABLE))
    loaded = load(packaged=calibration, flags={"exits.measure": "max-prob"})
    assert loaded.settings.exits.threshold == math.inf


def test_files_without_the_table_are_no_calibrations(tmp_path: Path) -> None:
    assert load().calibration is None
    assert load(files=[write(tmp_path / "a.toml", {"exits": EXITS})]).calibration is None
    (tmp_path / "b.toml").write_text("calibration = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"b\.toml: calibration is a table of calibration files"):
        load(files=[tmp_path / "b.toml"])


@pytest.mark.parametrize("key", ["certified", "policy", "max_tokens", "n"])
@pytest.mark.parametrize("value", [None, "three"])
def test_a_malformed_certificate_names_the_key(key: str, value: object) -> None:
    table = {k: v for k, v in TABLE.items() if k != key} | ({} if value is None else {key: [value]})
    with pytest.raises(ConfigError, match=rf"^here: calibration\.{key}: .* make the file again with"):
        read_certificate(Calibration("here", {}, table))


# At serving


@pytest.fixture
def serve(make_llm: Callable[..., LLM], tmp_path: Path) -> Callable[..., tuple[LLM, list[str]]]:
    """An LLM under a calibration file, made for the model as it is, and what the user was told."""
    plain = make_llm(strategy="full")
    own = {"model": plain.located.base.fingerprint}

    def run(document: Callable[[dict[str, Any]], dict[str, Any]] = lambda d: d, **flags: Any) -> tuple[LLM, list[str]]:
        file = write(tmp_path / "given.toml", document(sealed(EXITS, TABLE | own)))
        notes: list[str] = []
        settings = {
            "model.name": plain.located.base.name,
            "model.dtype": "float64",
            "model.device": "cpu",
            "cache.num_blocks": 64,
            "sampling.max_tokens": 6,
        }

        def resolve(packaged: Path | None) -> Loaded:
            return load(packaged=packaged, files=[file], flags=settings | flags)

        return LLM.from_loaded(resolve, note=notes.append), notes

    return run


def test_answers_under_the_certified_policy_say_so(serve: Callable[..., tuple[LLM, list[str]]]) -> None:
    llm, notes = serve()
    [answer] = llm.generate("abc")
    assert answer.certified == Guarantee(0.02, 0.95)
    line = output_line(answer, exits=True, token_details=False)
    assert json.loads(json.dumps(line))["exits"]["certified"] == {"tolerance": 0.02, "confidence": 0.95}
    assert notes == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"exits.threshold": [math.inf, 0.02]}, "thresholds: 0.02, certified for 0.01"),
        ({"exits.threshold": 0.01}, "exits: 2, 4, certified for 4"),
        ({"exits.measure": "max-prob"}, "measure: max-prob, certified for margin"),
        ({"exits.completion": "propagate"}, "completion: propagate, certified for copy"),
        ({"exits.decay": 1.5}, "decay: 1.5, certified for 0.0"),
        ({"model.dtype": "float32"}, "dtype: float32, certified for float64"),
        ({"batching.strategy": "all-exit"}, "strategy: all-exit, certified for split"),
        ({"sampling.max_tokens": 7}, "max_tokens is 7, certified for 6"),
        ({"sampling.temperature": 0.5}, "temperature is 0.5, and only greedy decoding is certified"),
        ({"sampling.presence_penalty": 1.0}, "presence_penalty is 1, and only greedy decoding is certified"),
    ],
)
def test_what_differs_is_told_once_and_with_each_answer(
    flags: dict[str, Any], reason: str, serve: Callable[..., tuple[LLM, list[str]]], tmp_path: Path
) -> None:
    llm, notes = serve(**flags)
    assert notes == [f"not certified: {reason} ({tmp_path / 'given.toml'})"]
    for answer in llm.generate(["abc", "def"]):
        assert output_line(answer, exits=True, token_details=False)["exits"]["reason"] == reason
        assert output_line(answer, exits=True, token_details=False)["exits"]["certified"] is False


def test_batch_and_cache_are_no_part_of_the_policy(serve: Callable[..., tuple[LLM, list[str]]]) -> None:
    llm, notes = serve(**{"batching.max_num_seqs": 2, "cache.block_size": 4, "sampling.seed": 9})
    assert {type(answer.certified) for answer in llm.generate(["a", "b", "c"])} == {Guarantee}
    assert notes == []


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(max_tokens=6, temperature=0.0), None),
        (SamplingParams(max_tokens=3), "max_tokens is 3, certified for 6"),
        (SamplingParams(temperature=1.0), "temperature is 1, and only greedy decoding is certified"),
        (SamplingParams(ignore_eos=True), "end-of-sequence tokens are ignored"),
        (SamplingParams(stop=("zzz",)), "stop strings cut the answer"),
        (SamplingParams(stop_token_ids=(7,)), "stop tokens cut the answer"),
        (SamplingParams(min_tokens=2), "min_tokens is 2, which keeps the answer from ending"),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias changes the logits, and only greedy decoding is certified"),
        (
            SamplingParams(repetition_penalty=1.5),
            "repetition_penalty is 1.5, and only greedy decoding is certified",
        ),
        (SamplingParams(frequency_penalty=-1), "frequency_penalty is -1, and only greedy decoding is certified"),
        (SamplingParams(top_p=0.5, top_k=3, min_p=0.1, logprobs=2), None),
    ],
)
def test_a_request_may_step_outside_the_policy(
    sampling: SamplingParams, reason: str | None, serve: Callable[..., tuple[LLM, list[str]]]
) -> None:
    llm, _ = serve()
    inside, other = llm.generate([Request("a", prompt="abc"), Request("b", prompt="abc", sampling=sampling)])
    assert inside.certified == Guarantee(0.02, 0.95)
    assert other.certified == (reason or Guarantee(0.02, 0.95))


def test_requests_may_step_inside_where_the_defaults_are_outside(serve: Callable[..., tuple[LLM, list[str]]]) -> None:
    llm, notes = serve(**{"sampling.max_tokens": 20})
    assert len(notes) == 1
    [answer] = llm.generate([Request("a", prompt="abc", sampling=SamplingParams(max_tokens=6))])
    assert answer.certified == Guarantee(0.02, 0.95)


def changed(section: str, **values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: document | {section: document[section] | values}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("exits", threshold=[math.inf, 0.005]), "the file was changed after it was made"),
        (changed("calibration", max_tokens=8), "the file was changed after it was made"),
        (changed("calibration", model="sha256:" + "0" * 64), "the file was changed after it was made"),
        (changed("calibration", certified=False, reason="chosen for a budget"), "chosen for a budget"),
        (
            lambda d: sealed(d["exits"], d["calibration"] | {"model": "sha256:" + "0" * 64}),
            "model: another fingerprint",
        ),
        (
            lambda d: sealed(d["exits"], d["calibration"] | {"heads": "sha256:" + "0" * 64}),
            "heads: another fingerprint",
        ),
    ],
)
def test_a_file_that_is_not_for_this_promises_nothing(
    change: Callable[[dict[str, Any]], dict[str, Any]], reason: str, serve: Callable[..., tuple[LLM, list[str]]]
) -> None:
    llm, notes = serve(change)
    assert len(notes) == 1
    assert notes[0].startswith(f"not certified: {reason}")
    [answer] = llm.generate("abc")
    assert isinstance(answer.certified, str)
    assert answer.certified.startswith(reason)


@pytest.mark.parametrize("flags", [{"batching.strategy": "full"}, {"exits.threshold": math.inf}])
def test_full_depth_needs_no_certificate(flags: dict[str, Any], serve: Callable[..., tuple[LLM, list[str]]]) -> None:
    llm, notes = serve(**flags)
    [answer] = llm.generate("abc")
    assert answer.certified is None
    assert not any("certified" in note for note in notes)


def test_without_a_calibration_nothing_is_said_of_it(make_llm: Callable[..., LLM]) -> None:
    [answer] = make_llm(exits=[2], threshold=0.1).generate("abc", SamplingParams(max_tokens=3))
    assert answer.certified is None
    assert set(output_line(answer, exits=True, token_details=False)["exits"]) == {"mean_layers", "share"}
