"""Learned completion: its maps are the best of their rank, and settings that ask for what heads lack are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median

import pytest
import torch
from test_gates import write_heads
from tiny import learned_kv
from torch import Tensor

from eeinfer import LLM, Request, SamplingParams
from eeinfer.core.request import TokenRecord
from eeinfer.engine.build import head_on
from eeinfer.errors import ConfigError, HeadsError
from eeinfer.exits.files import HeadsFile
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import rms_norm
from eeinfer.training import learned_kv as module
from eeinfer.training.learned_kv import OTHERS, Example, corrected, errors, examples, with_learned_kv
from eeinfer.training.traces import Answered

EXITS, DEPTH = (2, 4, 5), 6
HEADS = HeadsFile(tuple(ExitSpec(n, "shared") for n in EXITS), ({},) * len(EXITS))
THRESHOLDS = (0.1, inf, 0.5)
MakeLLM = Callable[..., LLM]


@pytest.fixture
def answers() -> list[Answered]:
    rows = torch.randint(0, 250, (50, 40), generator=torch.Generator().manual_seed(7)).tolist()
    return [Answered(f"a{i}", tuple(row), first=3) for i, row in enumerate(rows)]


def fitted(
    decoder: Decoder, answers: list[Answered], rank: int, thresholds: tuple[float, ...] = THRESHOLDS
) -> HeadsFile:
    return with_learned_kv(decoder, HEADS, answers, thresholds, rank)


def test_the_last_layer_needs_no_map(tiny_decoder: Callable[..., Decoder], answers: list[Answered]) -> None:
    found = fitted(tiny_decoder("gqa"), answers, 4)
    assert [spec.completion and spec.completion.layers for spec in found.specs] == [3, 1, None]
    for spec, own in zip(found.specs, found.tensors, strict=True):
        assert {name: tuple(t.shape) for name, t in own.items()} == spec.tensor_shapes(32, 272)


@pytest.mark.parametrize("variant", ["gqa", "qwen2", "qwen3", "gemma2"])
def test_maps_are_the_best_of_their_rank(
    variant: str, tiny_decoder: Callable[..., Decoder], answers: list[Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighted least squares, and for a low rank its fitted values' best approximation (Eckart and Young)."""
    monkeypatch.setattr(module, "RIDGE", 1e-12)
    decoder = tiny_decoder(variant)
    heads = [head_on(decoder, spec, {}) for spec in HEADS.specs]
    [everything] = [e for i, e in examples(decoder, heads, answers, THRESHOLDS) if i == 0]
    middle = float(heads[0].logits(everything.hidden).softmax(dim=-1).amax(dim=-1).median())
    thresholds = (middle, *THRESHOLDS[1:])
    [example] = [e for i, e in examples(decoder, heads, answers, thresholds) if i == 0]
    assert sorted(set(example.weight.tolist())) == pytest.approx([OTHERS, 1.0])
    scale = head(decoder, fitted(decoder, answers, 4, thresholds)).scale
    mean = (example.exact * weights(example)).sum(dim=2, keepdim=True) / example.weight.sum()
    unit = ((example.exact - mean).square() * weights(example)).sum(dim=(2, 3, 4), keepdim=True).sqrt()
    y = flat((example.exact - scale * example.propagated) / unit, example)
    x = rms_norm(example.hidden, None, decoder.config.norm_eps)
    x = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), dim=1) * example.weight.sqrt()[:, None]
    root = example.weight.sqrt()[:, None]
    centred = [z - root * (root * z).sum(dim=0) / example.weight.sum() for z in (x[:, :-1], y)]
    best = centred[0] @ torch.linalg.lstsq(*centred).solution
    full = (centred[1] - best).square().sum()
    for rank in (2, 5, 32):
        made = corrected(head(decoder, fitted(decoder, answers, rank, thresholds)), example)
        error = flat((example.exact - made) / unit, example).square().sum()
        lost = torch.linalg.svdvals(best)[rank:].square().sum()
        torch.testing.assert_close(error, full + lost, rtol=1e-6, atol=0)


def head(decoder: Decoder, heads: HeadsFile) -> module.LearnedKV:
    found = head_on(decoder, heads.specs[0], heads.tensors[0]).learned_kv
    assert found is not None
    return found


def weights(example: Example) -> Tensor:
    return example.weight[:, None, None]


def flat(values: Tensor, example: Example) -> Tensor:
    """[2, m, n, kv_heads, head_dim] as weighted rows, [n, ...]."""
    return values.permute(2, 0, 1, 3, 4).flatten(1) * example.weight.sqrt()[:, None]


def test_a_higher_rank_leaves_less_error(tiny_decoder: Callable[..., Decoder], answers: list[Answered]) -> None:
    decoder = tiny_decoder("gqa")
    found = {rank: errors(decoder, fitted(decoder, answers, rank), answers, THRESHOLDS) for rank in (1, 8, 32)}
    for i in (0, 1):
        propagated = {before for before, _ in (found[rank][i] for rank in found)}
        assert len(propagated) == 1
        learned = [found[rank][i][1] for rank in found]
        assert propagated.pop() > learned[0] > learned[1] > learned[2] > 0
    assert found[8].keys() == {0, 1}


def test_an_exit_with_a_gate_learns_from_what_the_gate_lets_go(
    make_llm: MakeLLM, tiny_decoder: Callable[..., Decoder], answers: list[Answered]
) -> None:
    decoder = tiny_decoder("gqa")
    spec = ExitSpec(2, "shared", gate=GateSpec(5))
    shapes = spec.tensor_shapes(32, make_llm().located.base.vocab_size)
    own = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    gated = head_on(decoder, spec, own)
    [(_, example)] = list(examples(decoder, [gated], answers, [0.5]))
    assert gated.gate is not None
    assert torch.equal(example.weight == 1, gated.gate(example.hidden) >= 0.5)
    assert 0 < (example.weight == 1).sum() < len(example.weight)


# Settings


@pytest.fixture
def heads(make_llm: MakeLLM, tmp_path: Path) -> Path:
    """A learned completion after 2 layers and none after 4."""
    llm = make_llm()
    own = learned_kv(llm.located.config, 2)
    return write_heads(tmp_path / "heads", llm, ExitSpec(2, "shared", completion=own), ExitSpec(4, "shared"))


def test_exits_without_it_are_told_and_propagate(heads: Path, make_llm: MakeLLM) -> None:
    notes: list[str] = []
    requests = [
        Request(str(i), prompt_token_ids=(7 * i, 8, 9), sampling=SamplingParams(max_tokens=20)) for i in range(4)
    ]

    def run(completion: str, threshold: float) -> list[TokenRecord]:
        options = {"exits": EXITS[:2], "completion": completion, "threshold": threshold, "note": notes.append}
        return [token for output in make_llm(heads=str(heads), **options).generate(requests) for token in output.tokens]

    middle = median(token.confidence for token in run("propagate", -inf) if token.confidence is not None)
    learned, propagated = (
        [(token.token_id, token.layers_executed) for token in run(completion, middle)]
        for completion in ("learned", "propagate")
    )
    assert {depth for _, depth in learned[1:]} == {2, 4, DEPTH}
    assert learned != propagated
    assert notes == ["no learned completion for exits 4: KV is propagated from there"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": "none", "exits": (3,)}, ["exits.completion", "without exit heads", "after 3 layers"]),
        ({"exits": (4,)}, ["exits.completion", "heads in", "after 4 layers", "--completion propagate", "tune-heads"]),
    ],
)
def test_heads_without_it_are_refused(
    options: dict[str, object], words: list[str], heads: Path, make_llm: MakeLLM
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(**({"heads": str(heads)} | options), completion="learned", threshold=0.5)
    for word in words:
        assert word in str(caught.value)


def test_an_exit_before_the_last_layer_needs_none(make_llm: MakeLLM) -> None:
    assert make_llm(heads="none", exits=(5,), completion="learned", threshold=0.5).exits == (5,)


def test_other_heads_of_keys_are_refused(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm()
    own = learned_kv(llm.located.config, 2)
    assert own is not None
    other = replace(own, kv_heads=own.kv_heads * 2, head_dim=own.head_dim // 2)
    folder = write_heads(tmp_path / "heads", llm, ExitSpec(2, "shared", completion=other))
    with pytest.raises(HeadsError, match="after 2 layers is for 4 KV heads of 4, and the model has 2 of 8"):
        make_llm(heads=str(folder), completion="learned", threshold=0.5)
