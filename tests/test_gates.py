"""Gates at work: which rows their exits' heads run for, in which numbers they are computed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eeinfer import LLM, Request, SamplingParams
from eeinfer.engine.build import head_on
from eeinfer.errors import ConfigError
from eeinfer.exits.check import Exit
from eeinfer.exits.files import HeadsFile, save_heads
from eeinfer.exits.gates import GateSpec
from eeinfer.exits.heads import ExitSpec
from eeinfer.model.decoder import Decoder

DEPTH = 6
MakeLLM = Callable[..., LLM]


def tensors_of(spec: ExitSpec, llm: LLM) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(spec.layers_executed)
    base = llm.located.base
    shapes = spec.tensor_shapes(base.hidden_size, base.vocab_size)
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def write_heads(folder: Path, llm: LLM, *specs: ExitSpec) -> Path:
    folder.mkdir()
    tensors = tuple(tensors_of(spec, llm) for spec in specs)
    save_heads(folder, llm.located.base, HeadsFile(specs, tensors), header={}, results=[{}] * len(specs))
    return folder


@pytest.fixture
def heads(make_llm: MakeLLM, tmp_path: Path) -> Path:
    """A gate after 2 layers and none after 4."""
    return write_heads(tmp_path / "heads", make_llm(), ExitSpec(2, "shared", gate=GateSpec(5)), ExitSpec(4, "shared"))


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=12)
    return [Request(str(i), prompt_token_ids=(7 * i + 1, 5 * i + 2), sampling=sampling) for i in range(4)]


def counted(exit_: Exit, rows: list[int]) -> Exit:
    """The exit, noting for how many rows its head is asked for logits."""

    def vocabulary(features: Tensor) -> Tensor:
        rows.append(len(features))
        return exit_.head.vocabulary(features)

    return replace(exit_, head=replace(exit_.head, vocabulary=vocabulary))


@pytest.mark.parametrize(("measure", "checks_rows_that_stay"), [("gate", False), ("max-prob", True)])
def test_the_head_runs_for_leaving_rows_only(
    measure: str, checks_rows_that_stay: bool, heads: Path, make_llm: MakeLLM
) -> None:
    options = {"heads": str(heads), "exits": (2,), "measure": measure}
    free = make_llm(**options, threshold=float("-inf")).generate(requests())
    typical = sorted(t.confidence for o in free for t in o.tokens if t.confidence is not None)
    llm, rows = make_llm(**options, threshold=typical[len(typical) // 2]), []
    llm.engine.runner.exits = tuple(counted(exit_, rows) for exit_ in llm.engine.runner.exits)
    outputs = llm.generate(requests())
    depths = [t.layers_executed for o in outputs for t in o.tokens[1:]]
    assert {2, DEPTH} == set(depths), "some rows leave and some stay"
    assert sum(rows) == (len(depths) if checks_rows_that_stay else depths.count(2))


def test_an_exit_in_use_needs_its_gate(heads: Path, make_llm: MakeLLM) -> None:
    options = {"heads": str(heads), "measure": "gate"}
    with pytest.raises(ConfigError) as caught:
        make_llm(**options, threshold=0.5)
    for word in ("exits.measure", str(heads), "after 4 layers", "--measure max-prob", "tune-heads"):
        assert word in str(caught.value)
    assert make_llm(**options, exits=(2,), threshold=0.5).exits == (2,)
    assert make_llm(**options, threshold=(0.5, float("inf"))).exits == (2,), "an exit that nobody reaches needs none"
    assert make_llm(**options, threshold=0.5, strategy="full").exits == ()


def test_without_heads_there_are_no_gates(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"without exit heads .* after 3 layers"):
        make_llm(heads="none", exits=(3,), measure="gate", threshold=0.5)


def test_a_gate_keeps_its_float32_on_a_narrow_model(tiny_decoder: Callable[..., Decoder], make_llm: MakeLLM) -> None:
    decoder = tiny_decoder("gqa", torch.bfloat16)
    spec = ExitSpec(2, "norm", gate=GateSpec(8))
    own = tensors_of(spec, make_llm())
    narrow, wide = head_on(decoder, spec, own).gate, head_on(tiny_decoder("gqa"), spec, own).gate
    assert narrow is not None
    assert wide is not None
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert (narrow(hidden).dtype, wide(hidden.double()).dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(narrow(hidden), wide(hidden.double()).float(), rtol=1e-5, atol=1e-6)
