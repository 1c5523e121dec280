"""Parts of distillation: cached answers, files of states, initial tensors, gates, and the figures that judge heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eeinfer import LLM, EeinferError, Request, SamplingParams
from eeinfer.config.load import load_settings
from eeinfer.engine.build import head_on
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.gates import GateSpec, gate_logit
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.training import gates as gates_module
from eeinfer.training import states as states_module
from eeinfer.training.answers import cached_answers, encoded, full_depth
from eeinfer.training.distill import batch_rows, likely_tokens, rate
from eeinfer.training.gates import Lesson, calibrated, initial_gate, lessons, train_gate
from eeinfer.training.judge import costs_of, figures, fit_temperature, predict
from eeinfer.training.least_squares import solve
from eeinfer.training.modules import DAMPING, TrainableHead, initial_tensors
from eeinfer.training.prompts import split
from eeinfer.training.selective import Costs, auroc, coverage, joint, smallest_threshold
from eeinfer.training.states import COMPLETE, state_files
from eeinfer.training.traces import Answered, answer_all, hidden_states

EXITS = (2, 4)
MADE_BY = {"model": "m", "seed": 0}


def requests(count: int) -> list[Request]:
    return [Request(f"r{i}", prompt=f"prompt {i}", sampling=SamplingParams(max_tokens=3 + i % 3)) for i in range(count)]


def traced(count: int, length: int = 30) -> list[Answered]:
    rows = torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(3)).tolist()
    return [Answered(f"a{i}", tuple(row[: length - i % 9]), first=2 + i % 4) for i, row in enumerate(rows)]


def states(decoder: Decoder, answers: list[Answered]) -> Tensor:
    groups = list(hidden_states(decoder, answers, [*EXITS, decoder.num_layers]))
    return torch.stack([torch.cat(parts) for parts in zip(*groups, strict=True)])


class Answering:
    """Cached answers of a tiny model, with a count of the requests that were really answered."""

    def __init__(self, make_llm: Callable[..., LLM], work: Path) -> None:
        self.llm, self.work, self.answered = make_llm(strategy="full"), work, 0

    def __call__(self, asked: list[Request], made_by: dict[str, object] = MADE_BY) -> list[Answered]:
        before = self.llm.stats.finished
        ready = encoded(asked, self.llm.engine.tokenizer, 272, lambda _: None)
        found = cached_answers(ready, self.work, made_by, lambda: self.llm, lambda _: None)
        self.answered = self.llm.stats.finished - before
        return found


def test_an_answer_is_made_once(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    answer = Answering(make_llm, tmp_path)
    first = answer(requests(4))
    assert answer.answered == 4
    assert [a.id for a in first] == ["r0", "r1", "r2", "r3"]
    assert answer(requests(6))[:4] == first
    assert answer.answered == 2
    changed = [Request("r0", prompt="another", sampling=SamplingParams(max_tokens=3)), *requests(6)[1:]]
    changed[1] = Request("r1", prompt="prompt 1", sampling=SamplingParams(max_tokens=2))
    answer(changed)
    assert answer.answered == 2  # another prompt, and another length, under known ids
    answer(requests(2), MADE_BY | {"seed": 1})
    assert answer.answered == 2  # other settings have a file of their own


def test_an_answer_is_the_prompt_and_all_but_the_last_token(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    [found] = Answering(make_llm, tmp_path)(requests(1))
    llm = make_llm(strategy="full")
    [output] = llm.generate(requests(1))
    prompt = llm.engine.tokenizer.encode("prompt 0")
    assert found == Answered("r0", (*prompt, *(t.token_id for t in output.tokens[:-1])), len(prompt) - 1)


def test_a_last_line_that_was_cut_off_is_made_again(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    answer = Answering(make_llm, tmp_path)
    whole = answer(requests(4))
    [path] = tmp_path.glob("answers-*.jsonl")
    text = path.read_bytes()
    path.write_bytes(text[:-5])
    assert answer(requests(4)) == whole
    assert answer.answered == 1
    assert sorted(path.read_bytes().splitlines()) == sorted(text.splitlines())


def test_a_line_that_is_no_answer_is_named(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    answer = Answering(make_llm, tmp_path)
    answer(requests(2))
    [path] = tmp_path.glob("answers-*.jsonl")
    path.write_text(path.read_text() + '{"id": "r9"}\n')
    with pytest.raises(EeinferError, match="line 4: this is no answer"):
        answer(requests(2))


def test_answers_are_at_full_depth() -> None:
    assert full_depth(load_settings()).settings.batching.strategy == "full"


def test_splits_are_by_id_and_share_nothing() -> None:
    answers = [Answered(f"id-{i}", (1, 2), 0) for i in range(2000)]
    parts = split(answers, gates=True)
    assert [len(parts[name]) / 2000 for name in ("train", "gate", "dev")] == pytest.approx([0.75, 0.15, 0.1], abs=0.03)
    assert sorted(a.id for part in parts.values() for a in part) == sorted(a.id for a in answers)
    few = split(answers[::-1][:500], gates=True)
    assert {a.id for a in few["dev"]} <= {a.id for a in parts["dev"]}
    assert split(answers, gates=False)["dev"] == parts["dev"]


def test_states_come_from_the_file_unless_it_is_incomplete(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, parts, folder = tiny_decoder("gqa"), {"train": traced(5), "dev": traced(3)}, tmp_path / "states"
    made: list[int] = []
    write = states_module._write
    monkeypatch.setattr(states_module, "_write", lambda *args: (made.append(1), write(*args)))

    def read() -> dict[str, Tensor]:
        return state_files(decoder, parts, [*EXITS, 6], folder, lambda _: None)

    first = read()
    for name, answers in parts.items():
        torch.testing.assert_close(first[name], states(decoder, answers), rtol=0, atol=0)
    read()
    assert len(made) == 2
    (folder / COMPLETE).unlink()  # as a kill leaves it
    (folder / "train.bin").write_bytes(b"half")
    torch.testing.assert_close(read()["train"], states(decoder, parts["train"]), rtol=0, atol=0)
    assert len(made) == 4


def test_states_that_do_not_fit_the_disk_are_refused(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(EeinferError, match="--work"):
        state_files(tiny_decoder("gqa"), {"train": traced(2)}, [2, 6], tmp_path / "s", lambda _: None)


@pytest.mark.parametrize(
    ("kind", "rank", "width"), [("norm", None, None), ("linear", None, None), ("linear", 8, None), ("mlp", 8, 16)]
)
def test_a_head_starts_from_copies_and_is_the_one_that_serves(
    tiny_decoder: Callable[..., Decoder], kind: str, rank: int | None, width: int | None
) -> None:
    decoder = tiny_decoder("gqa")
    data = states(decoder, traced(40))
    eps, w = decoder.config.norm_eps, decoder.weights
    spec = ExitSpec(4, kind, rank=rank, intermediate=width)
    maps, _ = solve([list(data[[1, 2]])], eps)
    own = initial_tensors(decoder, spec, maps[0])
    assert {name: tuple(t.shape) for name, t in own.items()} == spec.tensor_shapes(32, 272)
    torch.testing.assert_close(own["norm.weight"], w.final_norm)
    if rank:
        low = own["linear.up.weight"] @ own["linear.down.weight"]
        least = torch.linalg.svdvals(maps[0])[rank:].square().sum().sqrt()
        torch.testing.assert_close((low - maps[0]).norm(), least)
    if kind == "mlp":
        gate, up = w.gate_up[4].chunk(2)
        strength = gate.norm(dim=1) * up.norm(dim=1) * w.down[4].norm(dim=0)
        kept = [int((gate == row).all(dim=1).nonzero()) for row in own["mlp.gate_proj.weight"]]
        assert set(kept) == set(strength.topk(16).indices.tolist())
        torch.testing.assert_close(own["mlp.down_proj.weight"], DAMPING * w.down[4][:, kept])
    served = head_on(decoder, spec, own).features(data[1])
    torch.testing.assert_close(TrainableHead(spec, own, eps)(data[1]), served, rtol=0, atol=0)


def test_every_token_is_seen_once_an_epoch() -> None:
    epoch = torch.cat([batch_rows(100, 10, step, seed=1) for step in range(10)])
    again = torch.cat([batch_rows(100, 10, step, seed=1) for step in range(10, 20)])
    assert epoch.sort().values.tolist() == again.sort().values.tolist() == list(range(100))
    assert epoch.tolist() != again.tolist()
    torch.testing.assert_close(batch_rows(100, 10, 3, seed=1), epoch[30:40], rtol=0, atol=0)


def test_the_rate_warms_up_and_falls() -> None:
    rates = [rate(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 100)
    assert max(rates) == rates[99] == rates[100] == 1
    assert rates[550] == pytest.approx(0.5, abs=1e-3)
    assert rates[-1] == pytest.approx(0, abs=1e-4)


def test_likely_tokens_are_those_of_the_model(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    final = states(decoder, traced(1))[-1][:1]
    likely = decoder.logits(final).topk(8).indices[0]
    assert set(likely_tokens(decoder, final, 8).tolist()) == set(likely.tolist())


def test_a_gate_learns_what_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates_module, "LR", 0.02)  # the data is clean, and there is little of it
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(8000, 16, generator=draw)
    sizes = GateSpec(16, tokens=4)
    start = {
        name: torch.randn(shape, generator=draw) / shape[-1] ** 0.5 for name, shape in sizes.tensor_shapes(16).items()
    }
    target = (hidden[:, 0].abs() > 0.6).double()  # no linear gate can tell
    lesson = Lesson(hidden, target, torch.zeros(len(hidden), dtype=torch.int64))
    tensors = train_gate(sizes, start, lesson, 1e-5, seed=1)
    fresh = torch.randn(1000, 16, generator=draw)
    told = [auroc(gate_logit(sizes, own, 1e-5)(fresh), fresh[:, 0].abs() > 0.6) for own in (start, tensors)]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0] < 0.7
    assert told[1] > 0.85
    few = replace(lesson, hidden=hidden[:500], target=target[:500])
    once, again = (train_gate(sizes, start, few, 1e-5, seed=1) for _ in range(2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


def test_a_gate_starts_as_its_head_through_a_shortlist(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa", torch.float32)
    hidden = states(decoder, traced(60))[1]
    spec, own = ExitSpec(4, "norm", temperature=2.0), {"norm.weight": decoder.weights.final_norm}
    logits = head_on(decoder, spec, own).logits(hidden)
    lesson = Lesson(hidden, torch.zeros(len(hidden)), logits.argmax(dim=-1))
    sizes = GateSpec(32, tokens=272)  # as much as there is: nothing is lost
    start = initial_gate(decoder, spec, own, sizes, lesson, seed=3)
    assert {name: tuple(t.shape) for name, t in start.items()} == sizes.tensor_shapes(32)
    said = gate_logit(sizes, start, decoder.config.norm_eps)(hidden)
    sure = logits.softmax(dim=-1).amax(dim=-1)
    assert float(torch.corrcoef(torch.stack((said, sure.logit())))[0, 1]) > 0.9


def test_lessons_hold_both_kinds_of_answers(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    specs = (ExitSpec(2, "norm"), ExitSpec(4, "norm"))
    heads = HeadsFile(specs, ({"norm.weight": decoder.weights.final_norm},) * 2)
    data = {"gate": states(decoder, traced(12)), "train": states(decoder, traced(30))}
    unseen, n = predict(decoder, heads, data["gate"]), data["gate"].shape[1]
    for i, lesson in enumerate(lessons(decoder, heads, data)):
        assert torch.equal(lesson.hidden, torch.cat((data["gate"][i], data["train"][i])))
        assert torch.equal(lesson.tokens[:n], unseen.tokens[i])
        sure, agree = unseen.confidence["max-prob"][i], unseen.agree[i]
        taught = 0.7 * calibrated(sure, agree, sure) + 0.3 * agree
        torch.testing.assert_close(lesson.target[:n], taught)
        assert len(lesson.target) == len(lesson.hidden)


def test_calibration_by_hand() -> None:
    sure, agree = torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([True, False, False, True])
    # In order of max-prob: wrong, right, wrong, right. The two in the middle fall, so they share their mean.
    found = calibrated(sure, agree, torch.tensor([0.0, 0.1, 0.15, 0.25, 0.35, 0.4, 0.9]))
    assert found.tolist() == pytest.approx([0.001, 0.001, 0.25, 0.5, 0.75, 0.999, 0.999], abs=1e-6)


def test_auroc_by_hand() -> None:
    # Right ones at 0.9, 0.4, wrong ones at 0.4, 0.2: of four pairs three are in order and one is equal.
    found = auroc(torch.tensor([0.9, 0.4, 0.4, 0.2]), torch.tensor([True, True, False, False]))
    assert found == pytest.approx(3.5 / 4)
    assert auroc(torch.tensor([0.1, 0.2]), torch.tensor([True, True])) is None


def test_coverage_by_hand() -> None:
    confidence = torch.arange(100, 0, -1) / 100
    agree = torch.tensor([True] * 76 + [False] * 24)
    assert coverage(confidence, agree, 0.95) == pytest.approx(0.80)  # 76 of 80
    assert coverage(confidence, agree, 1.0) == pytest.approx(0.76)
    assert coverage(confidence, ~agree, 0.95) == 0
    assert smallest_threshold(confidence, agree, 0.95, digits=1) == pytest.approx(0.3)  # 0.21, rounded up


def test_layers_saved_by_hand() -> None:
    """100 tokens: 60 leave after 2 of 10 layers, 20 of the others after 5; all of them are right."""
    confidence = torch.zeros(2, 100)
    confidence[0, :60], confidence[1, 60:] = 0.9, 0.4
    agree = torch.ones(2, 100, dtype=torch.bool)
    agree[0, 60:], agree[1, 80:] = False, False
    confidence[1, 60:80] = 0.8
    costs = Costs(10, vocabulary=2.0, completion=0.1, exits=(2, 5), heads=(0.5, 0.5), gates=(0.05, 0.05))
    sure = joint("max-prob", confidence, agree, costs, (0.9, 0.8))
    assert sure.leaving == pytest.approx((0.6, 0.2))
    assert (sure.precision, sure.skipped) == (1.0, pytest.approx(0.6 * 8 + 0.2 * 5))
    # Full: 12. First exit: 2 + 8 * 0.1 and one check of 2.5; second: 5 + 5 * 0.1 and two checks; the rest: 12 and two.
    mean = 0.6 * (2.8 + 2.5) + 0.2 * (5.5 + 5.0) + 0.2 * (12 + 5.0)
    assert sure.saved == pytest.approx(12 - mean)
    assert sure.speedup == pytest.approx(12 / mean)
    gated = joint("gate", confidence, agree, costs, (0.9, 0.8))
    mean = 0.6 * (2.8 + 2.5 + 0.05) + 0.2 * (5.5 + 2.5 + 0.1) + 0.2 * (12 + 0.1)
    assert gated.saved == pytest.approx(12 - mean)
    never = joint("max-prob", confidence, agree, costs, (math.inf, math.inf))
    assert (never.saved, never.precision, never.speedup) == (pytest.approx(0), None, pytest.approx(1))
    # Left to itself: 60 of 60 at the first; of the other 40 no 50 may leave.
    chosen = joint("max-prob", confidence, agree, costs)
    assert chosen.thresholds == (pytest.approx(0.9), math.inf)


def test_costs_are_shares_of_a_layer(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48
    specs = (ExitSpec(2, "linear", gate=GateSpec(8)), ExitSpec(4, "norm"))
    own = tuple({n: torch.zeros(s) for n, s in spec.tensor_shapes(32, 272).items()} for spec in specs)
    found = costs_of(decoder, HeadsFile(specs, own))
    assert found.vocabulary == pytest.approx(272 * 32 / layer)
    assert found.completion == pytest.approx(2 * 16 * 32 / layer)
    assert found.heads == pytest.approx(((32 * 32 + 32) / layer, 32 / layer))
    assert found.gates == pytest.approx(((32 * 8 + 8 + 8 + 1) / layer, 0))


def test_figures_are_those_of_the_heads(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    data = states(decoder, traced(30))
    specs = tuple(ExitSpec(n, "shared") for n in EXITS)
    heads = HeadsFile(specs, ({}, {}))
    found = predict(decoder, heads, data)
    target = decoder.logits(data[-1]).argmax(-1)
    for i in range(2):
        probability, token = decoder.logits(data[i]).softmax(-1).max(-1)
        assert torch.equal(found.agree[i], token == target)
        torch.testing.assert_close(found.confidence["max-prob"][i], probability)
    judged = figures(found, costs_of(decoder, heads))
    assert [e.agreement for e in judged.exits] == pytest.approx(found.agree.double().mean(1).tolist())
    assert list(judged.joint) == ["max-prob"]
    assert json.loads(json.dumps(judged.to_json(), allow_nan=False))["tokens"] == data.shape[1]


def test_the_temperature_has_the_highest_likelihood(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("gqa")
    data = states(decoder, traced(30))[1:]
    found = fit_temperature(decoder, ExitSpec(4, "shared"), {}, data)
    target = decoder.logits(data[1]).argmax(-1)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(decoder.logits(data[0]) / temperature, target))

    assert 0.26 < found < 3.9
    assert loss(found) < min(loss(found * 1.1), loss(found / 1.1))


def test_prompts_that_cannot_be_answered_are_named(tiny_model: Callable[[str], Path]) -> None:
    llm = LLM(str(tiny_model("gqa")), dtype="float64", device="cpu", num_blocks=32, max_tokens=2, strategy="full")
    asked = [Request("long", prompt="a" * 500), Request("good", prompt="ab"), Request("empty", prompt_token_ids=())]
    notes: list[str] = []
    assert [answer.id for answer in answer_all(llm, asked, notes.append)] == ["good"]
    assert notes[-1].startswith("2 prompts cannot be answered and are left out; the first, long: the prompt has ")
    notes.clear()
    kept = encoded(asked, llm.engine.tokenizer, 272, notes.append)
    assert [request.id for request in kept] == ["long", "good"]
    assert notes == [notes[0]]
    assert notes[0].startswith("1 prompts cannot be answered and are left out; the first, empty: ")
