"""Packaged shapes are those of the released models, and random weights make a decoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eeinfer.errors import ConfigError
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import model_config
from eeinfer.model.random_weights import random_weights, shape_config, shape_names
from eeinfer.model.weights import destinations, stored, weight_bytes
from eeinfer.ops.token_batch import TokenBatch

CPU = torch.device("cpu")
# Counted by the makers, or from the checkpoint's size; tied matrices count once.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_shapes_have_the_parameters_of_the_released_models(name: str, count: int) -> None:
    config = shape_config(name)
    assert weight_bytes(config, torch.bfloat16) == 2 * count
    assert weight_bytes(config, torch.float32) == 4 * count
    assert getattr(torch, config.dtype).itemsize == 2


def test_every_packaged_shape_is_counted() -> None:
    assert shape_names() == sorted(PARAMETERS)


def test_the_default_models_shape_is_that_of_its_folder(default_model: Path) -> None:
    assert shape_config("smollm2-135m") == model_config(default_model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-3.1-8B", "did you mean 'llama-3.1-8b'?"),
        ("qwen3-06b", "did you mean 'qwen3-8b'?"),
        ("gpt2", "known: llama-2-7b, llama-3.1-8b"),
        ("../shapes/qwen3-8b", "did you mean"),
        ("", "known: "),
    ],
)
def test_an_unknown_shape_is_refused_with_a_suggestion(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_config(name)
    assert f"--random-weights {name!r}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("variant", ["biases", "tied-mqa", "qwen2", "qwen3", "gemma3", "olmo2", "phi3", "gpt-neo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_give_finite_logits_that_differ(
    variant: str, dtype: torch.dtype, tiny_model: Callable[[str], Path]
) -> None:
    config = model_config(tiny_model(variant))
    decoder = Decoder(config, random_weights(config, dtype, CPU, seed=3))
    cache = torch.zeros(config.num_layers, 2, 4, 4, config.num_kv_heads, config.head_dim, dtype=dtype)
    batch = TokenBatch.ragged([range(6), range(5)], torch.tensor([[2, 0], [1, 3]]), 4)
    hidden, _ = decoder.run(range(config.num_layers), decoder.embed(torch.arange(11)), batch, cache)
    logits = decoder.logits(hidden)
    assert logits.isfinite().all()
    assert len(logits.unique(dim=0)) == 11


@pytest.mark.parametrize("variant", ["biases", "tied-mqa", "qwen3", "gemma2", "olmo2", "gpt2"])
def test_random_weights_fill_every_tensor_and_follow_the_seed(variant: str, tiny_model: Callable[[str], Path]) -> None:
    config = model_config(tiny_model(variant))
    first, again, other = (random_weights(config, torch.float32, CPU, seed) for seed in (1, 1, 2))
    for name, tensor in stored(first).items():
        assert torch.equal(tensor, stored(again)[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "its memory is its own"
        if name.endswith("norm"):
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, stored(other)[name])
            assert tensor.std().item() == pytest.approx(0.02, rel=0.2)
            assert tensor.abs().min() > torch.finfo(torch.float32).tiny
    assert (first.lm_head is first.embedding) == config.tied
    assert sum(t.nbytes for _, t in destinations(config, first)) == weight_bytes(config, torch.float32)
