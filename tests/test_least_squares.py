"""Closed-form heads: the fit, the figures, the thresholds, and the whole path from prompts to heads that serve."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import VOCAB

from eeinfer import LLM, EeinferError, Request, SamplingParams
from eeinfer.config.load import load_settings
from eeinfer.engine.build import head_on
from eeinfer.errors import ConfigError, HeadsError
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import rms_norm
from eeinfer.training import traces
from eeinfer.training.least_squares import fit, judge, smallest_threshold, tune
from eeinfer.training.traces import Answered, hidden_states

EXITS = (2, 4)


def answers(count: int, length: int = 60) -> list[Answered]:
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 250, (count, length), generator=draw).tolist()
    return [Answered(f"a{i}", tuple(row[: length - i]), first=3 + i % 5) for i, row in enumerate(rows)]


def states(decoder: Decoder, traced: list[Answered]) -> list[torch.Tensor]:
    groups = list(hidden_states(decoder, traced, [*EXITS, decoder.num_layers]))
    return [torch.cat(parts) for parts in zip(*groups, strict=True)]


def test_hidden_states_do_not_depend_on_the_group(
    tiny_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, traced = tiny_decoder("gqa"), answers(7)
    together = states(decoder, traced)
    monkeypatch.setattr(traces, "_GROUP_TOKENS", 1)  # each answer alone
    alone = states(decoder, traced)
    assert [len(x) for x in together] == [sum(len(a.tokens) - a.first for a in traced)] * 3
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_fit_solves_the_least_squares_problem(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder, traced = tiny_decoder("gqa"), answers(40)
    maps, tokens = fit(decoder, traced, EXITS)
    *early, final = states(decoder, traced)
    assert tokens == len(final)
    y = rms_norm(final, None, decoder.config.norm_eps)
    for fitted, state in zip(maps, early, strict=True):
        x = rms_norm(state, None, decoder.config.norm_eps)
        best = torch.linalg.lstsq(x, y).solution.T
        error, least = ((x @ a.double().T - y).square().mean() for a in (fitted, best))
        assert fitted.dtype is torch.bfloat16
        assert least <= error <= least * 1.01 + 1e-5


def test_a_fitted_head_agrees_more_than_the_bare_one(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder, traced = tiny_decoder("gqa"), answers(60)
    maps, _ = fit(decoder, traced, EXITS)
    norm = decoder.weights.final_norm
    heads = HeadsFile(
        tuple(ExitSpec(n, "linear") for n in EXITS),
        tuple({"linear.weight": a, "norm.weight": norm} for a in maps),
    )
    results = judge(decoder, traced, heads)
    *early, final = states(decoder, traced)
    target = decoder.logits(final).argmax(-1)
    for result, spec, own, state in zip(results, heads.specs, heads.tensors, early, strict=True):
        fitted = head_on(decoder, spec, own).logits(state).argmax(-1)
        bare = decoder.logits(state).argmax(-1)
        assert result.layers_executed == spec.layers_executed
        assert result.agreement == pytest.approx(float((fitted == target).double().mean()), abs=5e-3)
        assert result.bare_agreement == pytest.approx(float((bare == target).double().mean()), abs=5e-3)
        assert result.agreement > result.bare_agreement


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ([], 0.01),
        ([0], 0.01),  # 99 of 100 agree
        (range(30), 0.3001),  # 70 of 71 agree down to 0.30, which float32 holds as a little more
        (range(100), math.inf),
    ],
)
def test_the_smallest_threshold_that_keeps_the_precision(wrong: list[int], expected: float) -> None:
    confidence = torch.arange(1, 101) / 100
    agree = torch.ones(100, dtype=torch.bool)
    agree[list(wrong)] = False
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert smallest_threshold(confidence[shuffled], agree[shuffled]) == pytest.approx(expected)


def test_equals_leave_together() -> None:
    """99 sure tokens that agree, and equal ones below of which half do not: none of those may leave."""
    confidence = torch.tensor([0.9] * 99 + [0.5] * 8)
    agree = torch.tensor([True] * 99 + [True, False] * 4)
    assert smallest_threshold(confidence, agree) == pytest.approx(0.9)
    assert smallest_threshold(torch.ones(100), torch.tensor([True] * 90 + [False] * 10)) == math.inf


def test_few_tokens_prove_nothing() -> None:
    assert smallest_threshold(torch.linspace(0.5, 1, 49), torch.ones(49, dtype=torch.bool)) == math.inf


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": f"prompt number {i}, {'ab' * (i % 7)}"}) for i in range(60)]
    path.write_text("\n".join([*lines, "{"]), encoding="utf-8")
    return path


def test_from_prompts_to_heads_that_serve(tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    model, out, notes = str(tiny_model("gqa")), tmp_path / "heads", []
    flags = {"model.name": model, "model.dtype": "float32", "sampling.max_tokens": 12, "cache.num_blocks": 200}
    resolve = partial(load_settings, flags=flags)
    made = tune(
        lambda packaged: resolve(packaged=packaged),
        prompts=prompts,
        exits=EXITS,
        output=out,
        num_prompts=None,
        note=notes.append,
    )
    assert [result.layers_executed for result in made] == list(EXITS)
    assert any("1 unusable line" in note for note in notes)
    header = json.loads((out / "exit_config.json").read_text(encoding="utf-8"))
    assert header["made_with"]["prompts"] == 60
    assert header["vocab_size"] == VOCAB
    # The heads come with thresholds; where none keeps the precision it is inf and that exit is not in use.
    llm = LLM(model, heads=str(out), dtype="float32", num_blocks=200)
    assert llm.settings.exits.layers == EXITS
    assert llm.settings.exits.threshold == tuple(result.threshold for result in made)
    always = LLM(model, heads=str(out), dtype="float32", num_blocks=200, threshold=-math.inf)
    assert always.exits == EXITS
    answer = always.generate([Request("r", prompt="hello", sampling=SamplingParams(max_tokens=5))])[0]
    assert [token.layers_executed for token in answer.tokens][1:] == [EXITS[0]] * (len(answer.tokens) - 1)
    with pytest.raises(HeadsError, match="another base"):
        LLM(str(tiny_model("mha")), heads=str(out))


def test_what_cannot_be_tuned_is_refused(tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    flags = {"model.name": str(tiny_model("gqa")), "sampling.max_tokens": 4, "cache.num_blocks": 64}
    run = partial(
        tune,
        lambda packaged: load_settings(flags=flags, packaged=packaged),
        prompts=prompts,
        output=tmp_path / "out",
        note=lambda _: None,
    )
    with pytest.raises(ConfigError, match="--exits"):
        run(exits=(4, 2), num_prompts=None)
    with pytest.raises(ConfigError, match="--exits"):
        run(exits=(99,), num_prompts=None)
    with pytest.raises(EeinferError, match="too few"):
        run(exits=(2,), num_prompts=1)


def test_an_unusable_prompt_is_left_out(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(strategy="full")
    good = Request("good", prompt="abc", sampling=SamplingParams(max_tokens=4))
    empty = Request("empty", prompt_token_ids=(), sampling=good.sampling)
    too_long = replace(good, id="long", prompt="x" * 1000)  # the tiny models' context is 160
    found = traces.answer_all(llm, [empty, good, too_long], lambda _: None)
    assert [answer.id for answer in found] == ["good"]
    assert found[0].tokens[: found[0].first + 1] == tuple(llm.engine.tokenizer.encode("abc"))
