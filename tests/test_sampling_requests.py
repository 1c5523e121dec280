"""Sampling parameters from a request to its answer, on tiny models: what they mean, and that they belong to the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import EOS, VOCAB, Loop, bare_exits, sequence

from eeinfer import LLM
from eeinfer.config.schema import SamplingSettings
from eeinfer.core.plan import Draw, Shaping
from eeinfer.core.request import FinishReason, Request, RequestOutput, SamplingParams
from eeinfer.engine.parallel_sampling import sequences_of
from eeinfer.engine.sampling import banned_tokens, effective, shaping_of
from eeinfer.errors import RequestError
from eeinfer.model.decoder import Decoder

PROMPT = (5, 6, 7, 6)
EARLY = {"exits": [2, 4], "threshold": 0.3, "measure": "max-prob"}


def asked(name: str = "a", **params: Any) -> Request:
    return Request(name, prompt_token_ids=PROMPT, sampling=SamplingParams(**{"max_tokens": 10} | params))


def ids(output: RequestOutput) -> list[int]:
    return [token.token_id for token in output.tokens]


MIXED = [
    asked("0", temperature=0.8, top_p=0.7, seed=1),
    asked("1", temperature=1.2, top_k=20, min_p=0.01, presence_penalty=1.5, seed=2, logprobs=3),
    asked("2"),
    asked("3", temperature=1.0, repetition_penalty=1.8, frequency_penalty=0.7, logit_bias={9: 3.0, 11: -5}),
    asked("4", repetition_penalty=1.5, logprobs=1),
    asked("5", temperature=1.0, n=3, top_p=0.9, min_tokens=4),
]


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Tokens with their depths and log-probabilities; the numbers but for the last bits, which a batch may change."""
    return [
        (t.token_id, t.layers_executed, [(p.token_id, round(p.logprob, 9), p.rank) for p in t.logprobs or ()])
        for one in output.sequences
        for t in one.tokens
    ]


def test_answers_do_not_depend_on_companions_or_order(make_llm: Callable[..., LLM]) -> None:
    together = make_llm(**EARLY).generate(MIXED)
    llm = make_llm(**EARLY)
    alone = [llm.generate([request])[0] for request in MIXED]
    turned = make_llm(**EARLY).generate(MIXED[::-1])[::-1]
    assert [*map(told, alone)] == [*map(told, together)] == [*map(told, turned)]
    assert {t.layers_executed for o in together for t in o.tokens} == {2, 4, 6}
    assert len({tuple(ids(output)) for output in together}) == len(MIXED)


def test_preemption_changes_nothing(tiny_decoder: Callable[..., Decoder]) -> None:
    """Penalties come from the sequence's own tokens, log-probabilities are kept: a replay finds what was there."""
    decoder, runs = tiny_decoder("gqa"), []
    shaping = Shaping(0, 0.8, 0.01, 1.4, 0.8, 0.5, ((7, 2.0),))
    for num_blocks in (64, 8):
        sequences = [
            sequence(str(i), range(10 * i, 10 * i + 3 + i), 14, temperature=0.8 * (i % 3), seed=i, **extra)
            for i, extra in enumerate([{}, *[{"shaping": shaping, "num_logprobs": i} for i in range(4)]])
        ]
        loop = Loop(decoder, bare_exits(decoder, (2, 4), "max-prob", 0.3), num_blocks=num_blocks)
        loop.run(sequences)
        runs.append([(s.tokens, s.depths, [[p.token_id for p in own or ()] for own in s.logprobs]) for s in sequences])
        assert (loop.scheduler.stats.preemptions > 0) == (num_blocks == 8)
    assert runs[0] == runs[1]
    assert {depth for _, depths, _ in runs[0] for depth in depths} == {2, 4, 6}


def test_confidence_is_of_the_logits_before_the_request_changes_them(make_llm: Callable[..., LLM]) -> None:
    """A bias forces token 9 at an exit; confidence and log-probabilities still speak of what the exit said."""
    llm = make_llm(exits=[2], threshold=float("-inf"), measure="max-prob")
    [answer] = llm.generate([asked(logit_bias={9: 100.0}, logprobs=1)])
    assert ids(answer) == [9] * 10
    assert [token.layers_executed for token in answer.tokens] == [6] + [2] * 9
    for token in answer.tokens[1:]:
        own, likeliest = token.logprobs
        assert likeliest.logprob == pytest.approx(log(token.confidence), abs=1e-9)
        assert own.token_id == 9
        assert own.rank > 1


def test_measures_that_need_no_vocabulary_sample_the_same_way(make_llm: Callable[..., LLM]) -> None:
    """`similarity` computes the logits of leaving rows alone: the others are as if they did not exist."""
    options = {"exits": [2], "threshold": float("-inf")}
    by_logits, by_similarity = (make_llm(measure=name, **options).generate(MIXED) for name in ("margin", "similarity"))
    assert [ids(a) for a in by_logits] == [ids(a) for a in by_similarity]
    assert [*map(told, by_logits)] == [*map(told, by_similarity)]


# Penalties and bias


def test_presence_penalty_and_repetition_penalty_keep_tokens_from_coming_back(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    plain = llm.generate([asked(max_tokens=40)])[0]
    assert len(set(ids(plain))) < 40, "the tiny model repeats itself"
    for params in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1e6}):
        answer = ids(llm.generate([asked(max_tokens=40, **params)])[0])
        assert len(set(answer)) > len(set(ids(plain)))
    assert not {*PROMPT} & {*ids(llm.generate([asked(max_tokens=40, repetition_penalty=1e6)])[0])}


def test_the_runs_settings_are_defaults_and_a_request_may_say_otherwise(make_llm: Callable[..., LLM]) -> None:
    plain, penalised = make_llm(), make_llm(repetition_penalty=50.0)
    [one] = penalised.generate([asked()])
    assert ids(one) == ids(plain.generate([asked(repetition_penalty=50.0)])[0])
    assert ids(penalised.generate([asked(repetition_penalty=1.0)])[0]) == ids(plain.generate([asked()])[0]) != ids(one)
    nucleus = make_llm(top_k=1, temperature=5.0)
    assert ids(nucleus.generate([asked()])[0]) == ids(plain.generate([asked()])[0])


# Ends


def test_stop_tokens_end_the_answer_and_have_no_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    [whole] = llm.generate([asked(logit_bias={65: 100})])
    assert set(ids(whole)) == {65}
    forced = {"logit_bias": {65: 100}, "stop_token_ids": [65]}
    [ended] = llm.generate([asked(**forced)])
    assert (ids(ended), ended.text, ended.finish_reason) == ([65], "", FinishReason.STOP)
    [kept] = llm.generate([asked(**forced, include_stop_str_in_output=True)])
    assert (ids(kept), kept.text) == ([65], whole.text[:1])


def test_min_tokens_holds_back_stop_tokens_ends_and_stop_strings(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    ending = {"logit_bias": {EOS: 100.0, 65: 50.0}}
    assert ids(llm.generate([asked(**ending)])[0]) == [EOS]
    assert ids(llm.generate([asked(**ending, min_tokens=3)])[0]) == [65, 65, 65, EOS]
    assert ids(llm.generate([asked(**ending, ignore_eos=True)])[0]) == [EOS] * 10
    assert ids(llm.generate([asked(**ending, ignore_eos=True, min_tokens=3)])[0]) == [65] * 3 + [EOS] * 7
    [text] = {t.text for t in llm.generate([asked(logit_bias={65: 100})])[0].tokens}
    [answer] = llm.generate([asked(logit_bias={65: 100}, stop=[text, "x" * 9], min_tokens=4)])
    assert (answer.text, len(answer.tokens), answer.finish_reason) == (4 * text, 5, FinishReason.STOP)


def test_a_stop_string_may_stay(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    [whole] = llm.generate([asked(ignore_eos=True)])
    stop = whole.text[2:5]
    at = whole.text.index(stop)
    [cut] = llm.generate([asked(stop=[stop], ignore_eos=True)])
    [kept] = llm.generate([asked(stop=[stop], ignore_eos=True, include_stop_str_in_output=True)])
    assert (cut.text, kept.text) == (whole.text[:at], whole.text[: at + 3])
    assert ids(cut) == ids(kept)
    assert "".join(token.text for token in kept.tokens) == kept.text


# Several answers


def test_n_answers_have_seeds_of_their_own(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    [several] = llm.generate([asked(temperature=1.5, seed=7, n=3)])
    singles = [llm.generate([asked(temperature=1.5, seed=7 + i)])[0] for i in range(3)]
    assert [ids(one) for one in several.outputs] == [ids(one) for one in singles]
    assert [one.index for one in several.outputs] == [0, 1, 2]
    assert (several.id, ids(several)) == ("a", ids(singles[0]))
    assert len({tuple(ids(one)) for one in several.outputs}) == 3
    assert singles[0].outputs == ()
    [unseeded] = llm.generate([asked(temperature=1.5, n=3)])
    assert ids(unseeded.outputs[0]) == ids(llm.generate([asked(temperature=1.5)])[0])
    assert llm.stats.finished == 3 + 3 + 3 + 1


def test_cancelling_ends_all_sequences_of_a_request(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=2)
    for one in sequences_of(asked("several", temperature=1.0, n=3, ignore_eos=True)):
        llm.engine.add(one)
    llm.engine.step()
    cancelled = llm.engine.cancel("several")
    assert cancelled is not None
    assert [(one.index, one.finish_reason) for one in cancelled.sequences] == [
        (i, FinishReason.ABORT) for i in range(3)
    ]
    assert (llm.engine.has_work, llm.stats.aborted) == (False, 3)
    llm.engine.scheduler.check()


def test_answers_of_several_requests_are_told_apart(make_llm: Callable[..., LLM]) -> None:
    requests = [asked(str(i), temperature=1.0, n=1 + i) for i in range(4)]
    done: list[str] = []
    answers = make_llm(max_num_seqs=2).generate(requests, on_output=lambda output: done.append(output.id))
    assert sorted(done) == [answer.id for answer in answers] == ["0", "1", "2", "3"]
    assert [len(answer.outputs) for answer in answers] == [0, 2, 3, 4]


def test_a_request_that_cannot_be_served_is_one_error(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    bad = [
        asked("greedy", n=2),
        asked("long", max_tokens=1000, n=2, temperature=1.0),
        asked("min", max_tokens=None, min_tokens=500),
        asked("stop", stop_token_ids=[VOCAB]),
        asked("bias", logit_bias={VOCAB: 1}),
        asked("told", logprobs=VOCAB + 1),
    ]
    answers = llm.generate([*bad, asked()])
    assert [answer.finish_reason for answer in answers[:-1]] == [FinishReason.ERROR] * len(bad)
    errors = {answer.id: answer.error for answer in answers}
    assert errors["greedy"] == "n is 2; it must be 1 when sampling is greedy: give a temperature above 0"
    assert errors["min"].startswith("min_tokens is 500; it must be at most max_tokens, ")
    assert errors["stop"] == f"stop_token_ids has token {VOCAB}, which is outside the vocabulary of {VOCAB}"
    assert errors["bias"] == f"logit_bias has token {VOCAB}, which is outside the vocabulary of {VOCAB}"
    assert errors["told"] == f"logprobs is {VOCAB + 1}; the vocabulary has {VOCAB} tokens"
    assert answers[-1].error is None


# What a request comes to


def test_log_probabilities_have_the_text_of_their_tokens(make_llm: Callable[..., LLM]) -> None:
    [answer] = make_llm().generate([asked(logprobs=-1, logit_bias={EOS: 100})])
    [token] = answer.tokens
    assert token.text == ""
    assert token.logprobs[0].text == "</s>"
    assert len(token.logprobs) == 1 + VOCAB
    assert sum(exp(one.logprob) for one in token.logprobs[1:]) == pytest.approx(1)


def test_what_asks_for_nothing_costs_nothing() -> None:
    run = SamplingSettings()
    for params in (SamplingParams(), SamplingParams(top_k=-1, top_p=1.0), SamplingParams(top_k=5, temperature=0.0)):
        assert shaping_of(effective(params, run, 5, 9)) is None
    assert sequence("a", [1], 5).draw() == Draw()
    assert banned_tokens(SamplingParams(stop_token_ids=(4,)), {3}, 9) == ()
    assert banned_tokens(SamplingParams(stop_token_ids=(4,), min_tokens=1), {3, 12}, 9) == (3, 4)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 3),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 400),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=100),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(-1, 5),
        "seed": st.integers(0, 2**63 - 1),
    },
)


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(params=PARAMS)
def test_whatever_a_request_asks_it_is_answered_in_bounds(make_llm: Callable[..., LLM], params: dict[str, Any]) -> None:
    request = asked(max_tokens=5, **params)
    [answer] = make_llm(**EARLY).generate([request])
    sampling = request.sampling
    assert answer.error is None
    assert sampling.min_tokens <= len(answer.tokens) <= 5
    ends = [t in {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))} for t in ids(answer)]
    assert not any(ends[:-1])
    assert ends[-1] == (answer.finish_reason is FinishReason.STOP)
    assert all((token.logprobs is not None) == (sampling.logprobs is not None) for token in answer.tokens)


def test_a_request_is_checked_again_when_it_is_changed() -> None:
    with pytest.raises(RequestError, match="min_tokens is 4; it must be at most max_tokens, 3"):
        replace(SamplingParams(min_tokens=4), max_tokens=3)
