"""What must hold on any model: exits off is the plain engine, rows do not depend on each other, NaN stays at home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest
import torch
from tiny import EOS, Loop, Script, bare_exits, sequence

from eeinfer import LLM, Request, RequestOutput, SamplingParams
from eeinfer.config.schema import Measure
from eeinfer.core.plan import Pass
from eeinfer.core.request import FinishReason
from eeinfer.core.sequence import Sequence as Seq
from eeinfer.exits.files import HeadsFile, save_heads
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder

EXITS, DEPTH = (2, 4), 6
MEASURES = get_args(Measure)
QUORUMS = ("all-exit", "any", "majority", "mean")
NAN = float("nan")

MakeLLM = Callable[..., LLM]
TinyDecoder = Callable[..., Decoder]


def requests() -> list[Request]:
    """Six prompts and answers of unequal length."""
    prompts = [[(17 * i + 29 * j) % 256 for j in range(3 + 4 * i % 11)] for i in range(6)]
    return [
        Request(str(i), prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=12 + i % 4))
        for i, prompt in enumerate(prompts)
    ]


def tokens(output: RequestOutput) -> list[int]:
    return [token.token_id for token in output.tokens]


def depths(output: RequestOutput) -> list[int]:
    return [token.layers_executed for token in output.tokens]


def rows(outputs: Iterable[RequestOutput]) -> dict[str, list[tuple[int, int]]]:
    """(token, depth) of every generated token, by request."""
    return {o.id: list(zip(tokens(o), depths(o), strict=True)) for o in outputs}


@pytest.fixture
def measured_by(make_llm: MakeLLM, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Options for a measure with the model's own head at the exits; `gate` brings gates."""

    def options(measure: str) -> dict[str, Any]:
        gates = {"heads": str(write_heads(tmp_path / "gates", make_llm(), "shared"))} if measure == "gate" else {}
        return {"measure": measure, "exits": EXITS} | gates

    return options


@pytest.mark.parametrize("threshold", [2.0, float("inf")])
@pytest.mark.parametrize("strategy", ["split", *QUORUMS])
def test_unreachable_thresholds_equal_full_depth(strategy: str, threshold: float, make_llm: MakeLLM) -> None:
    full = make_llm(strategy="full").generate(requests())
    llm = make_llm(strategy=strategy, exits=EXITS, threshold=threshold)
    outputs = llm.generate(requests())
    assert len(llm.engine.runner.exits) == (2 if threshold == 2.0 else 0), "2.0 checks, inf does not"
    assert [tokens(o) for o in outputs] == [tokens(o) for o in full]
    assert all(set(depths(o)) == {DEPTH} for o in outputs)
    assert llm.stats.involuntary_exits == llm.stats.involuntary_stays == 0


@pytest.mark.parametrize("strategy", ["split", *QUORUMS])
@pytest.mark.parametrize("measure", MEASURES)
def test_threshold_minus_infinity_leaves_at_the_first_exit(
    strategy: str, measure: str, make_llm: MakeLLM, measured_by: Callable[[str], dict[str, Any]]
) -> None:
    llm = make_llm(strategy=strategy, **measured_by(measure), threshold=float("-inf"))
    outputs = llm.generate(requests())
    reference = make_llm(exits=EXITS[:1], measure="max-prob", threshold=float("-inf"))
    assert rows(outputs) == rows(reference.generate(requests())), "the token is the head's, whatever the measure"
    for output in outputs:
        assert depths(output) == [DEPTH, *[EXITS[0]] * (len(output.tokens) - 1)]
        assert output.tokens[0].confidence is None
        assert all(0 <= t.confidence <= 1 for t in output.tokens[1:] if t.confidence is not None)
    assert llm.stats.involuntary_exits == llm.stats.involuntary_stays == 0


@pytest.mark.parametrize("measure", MEASURES)
def test_all_exit_on_identical_prompts_equals_one(
    measure: str, make_llm: MakeLLM, measured_by: Callable[[str], dict[str, Any]]
) -> None:
    prompt = tuple(range(40, 49))
    options = measured_by(measure)
    options["threshold"] = typical_thresholds(make_llm, **options)
    sampling = SamplingParams(max_tokens=30)
    copies = [Request(str(i), prompt_token_ids=prompt, sampling=sampling) for i in range(4)]
    alone = make_llm(strategy="all-exit", **options).generate(copies[:1])
    together = make_llm(strategy="all-exit", **options).generate(copies)
    assert set(depths(alone[0])[1:]) > {DEPTH}, "some tokens leave and some stay"
    assert all(rows([o])[o.id] == rows(alone)["0"] for o in together)


def typical_thresholds(make_llm: MakeLLM, **options: Any) -> tuple[float, ...]:
    """For each exit a threshold that about half of the tokens reach."""

    def typical(depth: int) -> float:
        outputs = make_llm(**options | {"exits": (depth,), "threshold": float("-inf")}).generate(requests())
        return median(t.confidence for o in outputs for t in o.tokens if t.confidence is not None)

    return tuple(map(typical, EXITS))


def write_heads(folder: Path, llm: LLM, kind: str) -> Path:
    """Random heads of one kind with gates at both exits; the second has its own vocabulary matrix and a temperature."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    rank, intermediate = 8 if kind == "linear" else None, 24 if kind == "mlp" else None
    first = ExitSpec(2, kind, rank, intermediate=intermediate, gate=GateSpec(6))  # type: ignore[arg-type]
    specs = [first, replace(first, layers_executed=4, rank=None, tied=False, temperature=1.5)]
    base = llm.located.base
    tensors = tuple(
        {
            name: torch.rand(shape, generator=generator) + 0.5
            if name in {"norm.weight", "mlp_norm.weight"}
            else torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
            for name, shape in spec.tensor_shapes(base.hidden_size, base.vocab_size).items()
        }
        for spec in specs
    )
    save_heads(folder, base, HeadsFile(tuple(specs), tensors), header={}, results=[{}, {}])
    return folder


@pytest.mark.parametrize(
    ("kind", "measure", "dtype"),
    [("shared", measure, "float64") for measure in MEASURES]
    + [("norm", "max-prob", "float64"), ("linear", "margin", "float64"), ("linear", "similarity", "float64")]
    + [("mlp", "entropy", "float64"), ("mlp", "gate", "float64"), ("linear", "gate", "float64")]
    + [("shared", "max-prob", "float32"), ("linear", "entropy", "float32"), ("mlp", "gate", "float32")],
)
def test_split_rows_do_not_depend_on_companions(
    kind: str, measure: str, dtype: str, make_llm: MakeLLM, tmp_path: Path
) -> None:
    """Each request alone, all at once, in reverse, two at a time, and with so few blocks that some are preempted."""
    bare = kind == "shared" and measure != "gate"
    heads = "none" if bare else str(write_heads(tmp_path / "heads", make_llm(), kind))
    options: dict[str, Any] = {"exits": EXITS, "measure": measure, "dtype": dtype, "heads": heads, "num_blocks": 64}
    options["threshold"] = typical_thresholds(make_llm, **options)
    alone = make_llm(**options)
    expected: dict[str, list[tuple[int, int]]] = {}
    for request in requests():
        expected |= rows(alone.generate([request]))
    assert {depth for row in expected.values() for _, depth in row} == {*EXITS, DEPTH}, "tokens leave everywhere"
    few = make_llm(**options | {"num_blocks": 8})
    runs = {
        "together": make_llm(**options | {"max_num_seqs": 6}).generate(requests()),
        "reversed": make_llm(**options).generate(requests()[::-1]),
        "two at a time": make_llm(**options | {"max_num_seqs": 2, "block_size": 3}).generate(requests()),
        "small prefills": make_llm(**options | {"max_num_batched_tokens": 3}).generate(requests()),
        "few blocks": few.generate(requests()),
    }
    assert few.stats.preemptions > 0
    for name, outputs in runs.items():
        assert rows(outputs) == expected, name
    assert few.stats.involuntary_exits == few.stats.involuntary_stays == 0


def one_iteration(
    decoder: Decoder, strategy: str, confidences: Sequence[dict[int, float]], *, sticky: bool = False
) -> tuple[list[Seq], tuple[int, int]]:
    """Rows with these confidences by exit, decoded once together. Their sequences; involuntary exits and stays."""
    script = Script(lambda s, _, depth: confidences[int(s.request_id)][depth])
    exits = script.exits(decoder, sorted(confidences[0]))
    loop = Loop(decoder, exits, script, strategy=strategy, sticky=sticky, max_num_seqs=len(confidences))
    sequences = [sequence(str(i), [i + 1, i + 2], 2) for i in range(len(confidences))]
    loop.run(sequences)
    return sequences, (loop.scheduler.stats.involuntary_exits, loop.scheduler.stats.involuntary_stays)


# Confidences at one exit against 0.5; how many rows leave below it, and how many stay though ready.
@pytest.mark.parametrize(
    ("strategy", "confidences", "leaves", "exits", "stays"),
    [
        ("all-exit", (0.9, 0.5, 0.7), True, 0, 0),
        ("all-exit", (0.9, 0.5, 0.49), False, 0, 2),
        ("any", (0.5, 0.1, 0.2, 0.3), True, 3, 0),
        ("any", (0.4, 0.1, 0.2, 0.3), False, 0, 0),
        ("majority", (0.9, 0.8, 0.1), True, 1, 0),
        ("majority", (0.9, 0.8, 0.1, 0.2), False, 0, 2),
        ("majority", (0.9, 0.1, 0.2), False, 0, 1),
        ("mean", (1.0, 0.5, 0.25), True, 1, 0),
        ("mean", (0.75, 0.25), True, 1, 0),
        ("mean", (0.5, 0.25, 0.625), False, 0, 2),
        # A row that failed is not asked.
        ("all-exit", (0.9, NAN, 0.6), True, 0, 0),
        ("majority", (0.9, NAN, 0.1), False, 0, 1),
        ("majority", (0.9, NAN, 0.8), True, 0, 0),
        ("mean", (0.75, NAN, 0.25), True, 1, 0),
        ("any", (NAN, NAN, 0.1), False, 0, 0),
    ],
)
def test_quorums_and_their_counters(
    strategy: str, confidences: tuple[float, ...], leaves: bool, exits: int, stays: int, tiny_decoder: TinyDecoder
) -> None:
    sequences, counters = one_iteration(tiny_decoder("gqa"), strategy, [{3: c} for c in confidences])
    for s, confidence in zip(sequences, confidences, strict=True):
        if isnan(confidence):
            assert s.finish_reason is FinishReason.ERROR
            assert s.depths == [DEPTH]
        else:
            assert s.depths == [DEPTH, 3 if leaves else DEPTH]
            assert s.confidences[1] == (confidence if leaves else None)
    assert counters == (exits, stays)


@pytest.mark.parametrize(("sticky", "depth", "counters"), [(False, DEPTH, (0, 2)), (True, 4, (1, 1))])
def test_sticky_rows_stay_ready_for_their_iteration(
    sticky: bool, depth: int, counters: tuple[int, int], tiny_decoder: TinyDecoder
) -> None:
    """Row 0 is ready after 2 layers, row 1 after 4; sticky lets both leave after 4, row 0 below the threshold there."""
    confidences = [{2: 0.9, 4: 0.1}, {2: 0.1, 4: 0.9}]
    sequences, counted = one_iteration(tiny_decoder("gqa"), "all-exit", confidences, sticky=sticky)
    assert [s.depths[1] for s in sequences] == [depth, depth]
    assert counted == counters


def test_sticky_does_not_reach_into_the_next_iteration(tiny_decoder: TinyDecoder) -> None:
    decoder = tiny_decoder("gqa")
    script = Script(lambda s, index, depth: 0.9 if (s.request_id, index, depth) == ("0", 1, 2) else 0.1)
    loop = Loop(decoder, script.exits(decoder, EXITS), script, strategy="any", sticky=True)
    sequences = [sequence(str(i), [i + 1, i + 2], 4) for i in range(2)]
    loop.run(sequences)
    assert [s.depths for s in sequences] == [[DEPTH, 2, DEPTH, DEPTH]] * 2
    assert not any(any(p.flagged) for p in loop.plans if isinstance(p, Pass)), "who left is not flagged"


def test_a_pass_holds_only_the_rows_that_go_on(tiny_decoder: TinyDecoder) -> None:
    """Under `split` ready rows are gone from the next stage of the same iteration."""
    decoder = tiny_decoder("gqa")
    script = Script(lambda s, _, depth: 0.9 if depth == (2, 4, 9)[int(s.request_id)] else 0.1)
    loop = Loop(decoder, script.exits(decoder, EXITS), script)
    loop.run([sequence(str(i), [i + 1, i + 2], 3) for i in range(3)])
    assert [(p.stage, len(p.rows)) for p in loop.plans if isinstance(p, Pass)] == [(0, 3), (1, 2), (2, 1)] * 2


def test_end_of_sequence_ends_at_any_depth(tiny_decoder: TinyDecoder) -> None:
    decoder = tiny_decoder("gqa")
    exits = bare_exits(decoder, EXITS, "max-prob", 0.25)
    free = [sequence(str(i), [i, 2 * i, 3 * i], 20) for i in range(6)]
    Loop(decoder, exits).run(free)
    ended = [
        sequence(str(i), [i, 2 * i, 3 * i], 20, eos_token_ids=frozenset({s.generated[9]})) for i, s in enumerate(free)
    ]
    Loop(decoder, exits).run(ended)
    for s, whole in zip(ended, free, strict=True):
        stop = whole.generated.index(whole.generated[9]) + 1
        assert (s.generated, s.depths) == (whole.generated[:stop], whole.depths[:stop])
        assert s.finish_reason is FinishReason.STOP
    assert len({s.depths[-1] for s in ended}) > 1


# NaN


def poisoned(llm: LLM, token: int) -> LLM:
    """The same engine with a NaN embedding for one token."""
    llm.engine.runner.decoder.weights.embedding[token] = NAN
    return llm


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("strategy", ["full", "split", "all-exit", "mean"])
def test_nan_in_a_prompt_fails_that_request_only(
    strategy: str, measure: str, make_llm: MakeLLM, measured_by: Callable[[str], dict[str, Any]]
) -> None:
    options = measured_by(measure) | {"strategy": strategy, "threshold": 2.0, "num_blocks": 16}
    clean = make_llm(**options).generate(requests())
    bad = Request(
        "bad", prompt_token_ids=(*range(200, 210), EOS, *range(200, 210)), sampling=SamplingParams(max_tokens=5)
    )
    llm = poisoned(make_llm(**options, max_num_batched_tokens=6), EOS)
    assert EOS not in {t for o in clean for t in tokens(o)}, "the poison is in no other request"
    outputs = llm.generate([bad, *requests()])
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert "NaN" in (outputs[0].error or "")
    assert outputs[0].tokens == ()
    assert rows(outputs[1:]) == rows(clean)
    assert (llm.stats.failed, llm.stats.finished) == (1, 6)
    assert rows(llm.generate(requests())) == rows(clean), "its blocks are in use again"


@pytest.mark.parametrize(("strategy", "threshold"), [("full", 2.0), ("split", 2.0), ("split", -1.0), ("all-exit", 2.0)])
@pytest.mark.parametrize("block_size", [4, 16])
def test_nan_while_decoding_fails_that_request_only(
    block_size: int, strategy: str, threshold: float, make_llm: MakeLLM
) -> None:
    """A token whose embedding is NaN is generated: its sequence fails beside shorter and longer companions."""
    options = {"strategy": strategy, "exits": EXITS, "threshold": threshold, "block_size": block_size}
    batch = requests()
    clean = make_llm(**options).generate(batch)
    used = [[*(r.prompt_token_ids or ()), *tokens(o)] for r, o in zip(batch, clean, strict=True)]
    victims = 0
    for i, output in enumerate(clean):
        own, others = tokens(output), {t for j, all_tokens in enumerate(used) if j != i for t in all_tokens}
        fresh = [t for t in own[2:-1] if t not in others and used[i].count(t) == 1]
        if fresh:
            victims += 1
            outputs = poisoned(make_llm(**options), fresh[0]).generate(batch)
            assert [o.id for o in outputs if o.error] == [output.id], f"request {i} of the batch took others with it"
            assert tokens(outputs[i]) == own[: own.index(fresh[0]) + 1], "what came before the NaN is kept"
            assert rows(outputs[:i] + outputs[i + 1 :]) == rows(clean[:i] + clean[i + 1 :])
    assert victims >= 3
