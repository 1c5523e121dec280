"""Whole models on Triton kernels, interpreted where there is no GPU, and where they cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import load_decoder

from eeinfer import LLM, Request, RequestOutput, SamplingParams
from eeinfer.engine.build import kernels_for
from eeinfer.errors import ConfigError
from eeinfer.model.decoder import Decoder
from eeinfer.ops.token_batch import TokenBatch
from eeinfer.ops.unavailable import Unavailable

pytest.importorskip("triton", reason="triton is not installed here; it is for Linux alone")

from triton import knobs

from eeinfer.model import triton as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where kernels are interpreted
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tiny models are loaded on the CPU, and kernels run on the GPU here")
@pytest.mark.parametrize("variant", ["biases", "qwen3", "gemma2", "olmo2", "phi3", "gpt2"])
def test_families_are_computed_as_by_torch(variant: str, tiny_model: Callable[[str], Path]) -> None:
    plain = load_decoder(tiny_model(variant), torch.float32)
    ours = Decoder(plain.config, plain.weights, parts=kernels.triton(plain.config, torch.float32, CPU))
    layers, config = range(2, 4), plain.config
    tables = torch.tensor([[3, 0], [1, 4]])
    caches = [torch.zeros(config.num_layers, 2, 6, 8, config.num_kv_heads, config.head_dim) for _ in range(2)]
    ragged, decode = TokenBatch.ragged([range(9), range(5)], tables, 8), TokenBatch.decode
    for batch in (ragged, decode(torch.tensor([9, 5]), tables, 8)):
        hidden = torch.randn(len(batch.positions), config.hidden_size, generator=torch.Generator().manual_seed(1))
        found, _ = ours.run(layers, hidden, batch, caches[0])
        expected, _ = plain.run(layers, hidden, batch, caches[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for decoder, cache in ((ours, caches[0]), (plain, caches[1])):
            decoder.store_layers(4, *decoder.project_kv(4, hidden, batch.positions), batch.slots, cache)
        torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.logits(hidden), plain.logits(hidden), rtol=1e-4, atol=1e-4)


def answers(outputs: list[RequestOutput]) -> list[list[tuple[int, int]]]:
    return [[(token.token_id, token.layers_executed) for token in output.tokens] for output in outputs]


@pytest.mark.parametrize("completion", ["propagate", "copy"])
def test_an_engine_gives_the_same_tokens_at_the_same_depths(completion: str, make_llm: Callable[..., LLM]) -> None:
    requests = [
        Request(str(i), prompt_token_ids=tuple(range(7 * i, 9 * i + 3)), sampling=SamplingParams(max_tokens=6))
        for i in range(2)
    ]
    options = {"dtype": "float32", "exits": (2, 4), "threshold": 0.5, "measure": "margin", "completion": completion}
    options |= {"num_blocks": 4}  # one of them is preempted, and replayed
    engines = [make_llm(kernels=name, device=DEVICE.type, **options) for name in ("triton", "torch")]
    found, expected = (answers(engine.generate(requests)) for engine in engines)
    assert all(engine.stats.preemptions > 0 for engine in engines)
    assert found == expected
    assert len({depth for answer in found for _, depth in answer}) > 1, "some leave early"


def test_auto_is_triton_on_cuda_and_native_on_a_cpu() -> None:
    assert kernels_for("auto", torch.device("cuda", 1)) == "triton"
    assert kernels_for("auto", CPU) == "native"
    assert kernels_for("torch", torch.device("cuda")) == "torch"


def test_what_the_kernels_do_not_know_is_refused(
    tiny_model: Callable[[str], Path], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_decoder(tiny_model("gqa"), torch.float32).config
    with pytest.raises(Unavailable, match=r"the model is in torch\.float64"):
        kernels.triton(config, torch.float64, CPU)
    with pytest.raises(Unavailable, match="heads up to 256, not of 320"):
        kernels.triton(replace(config, head_dim=320), torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"model.kernels = 'triton'.*use auto or torch"):
        make_llm(kernels="triton", dtype="float64")
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(Unavailable, match="for CUDA, and the model is on cpu"):
        kernels.triton(config, torch.float32, CPU)
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="triton is not installed") as caught:
        kernels.triton(config, torch.float32, CPU)
    assert caught.value.fixable


def test_a_kernel_that_does_not_run_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nand more")

    monkeypatch.setattr("eeinfer.ops.triton.norm.rms_norm", broken)
    with pytest.raises(Unavailable, match=r"does not run on .*: Failed to find C compiler\.$") as caught:
        kernels.check_machine(DEVICE)
    assert caught.value.fixable
