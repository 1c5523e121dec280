"""Quick tests of this machine: a tiny random model answers in batches with early exit, and must match a reference."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from eeinfer.config.load import load_settings
from eeinfer.config.schema import Kernels
from eeinfer.core.request import FinishReason, Request, RequestOutput, SamplingParams
from eeinfer.engine.build import (
    Located,
    Model,
    build_engine,
    build_runner,
    device_of,
    dtype_of,
    new_decoder,
    plan_exits,
)
from eeinfer.exits.files import Base
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig, model_config
from eeinfer.model.folder import CONFIG_FILE
from eeinfer.model.native import native
from eeinfer.model.random_weights import STANDARD_DEVIATION, random_weights
from eeinfer.model.tokenizer import NoTokenizer
from eeinfer.model.weights import Weights, stored
from eeinfer.ops.token_batch import TokenBatch

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_EXITS = {"exits.layers": (2, 4), "exits.threshold": 0.2, "batching.strategy": "split"}
_GAIN = 2.0  # of every matrix, so that each layer matters and the best token wins by far more than rounding
_PROMPTS, _TOKENS = 8, 12
# Heads of 32 are the smallest that native kernels know; with few layers, rounding does not hide errors.
_FOR_KERNELS = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
_LENGTHS, _BLOCK_SIZE = (40, 1, 7), 16  # of the prompts of the test of kernels: one is long, so that keys are packed
TOLERANCE = 1.2  # times the error that torch has in bfloat16 too

Tokens = list[tuple[int, int]]  # (token, layers executed)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The outcome: tokens by layers executed, and the first answer that differs, in words; None if none does."""

    depths: dict[int, int]
    difference: str | None

    @property
    def passed(self) -> bool:
        """Whether all answers match, and tokens left at several depths."""
        return self.difference is None and len(self.depths) > 1


@dataclass(frozen=True, slots=True)
class KernelTest:
    """The outcome.

    Attributes:
        error: of the logits by native kernels, root mean square, in parts of that of the logits.
        torch_error: of those by torch in bfloat16.
        invariant: each row has the bits that it has alone.
    """

    error: float
    torch_error: float
    invariant: bool

    @property
    def passed(self) -> bool:
        """Whether errors are those of rounding, and a row's bits its own. NaN is no pass."""
        return self.error <= TOLERANCE * self.torch_error and self.invariant


def self_test(device: str, kernels: Kernels = "torch") -> SelfTest:
    """Answers in float32 on `device`, in batches that a small cache preempts, against the same model in float64.

    `kernels` are any but native ones, which know no float32. The reference runs on the CPU, one request at a time and
    with room for all of it. Tokens and depths must be equal, as under `split` they do not depend on a row's companions.

    Raises:
        EeinferError: the device cannot be used.
    """
    crowded = {"batching.max_num_seqs": 8, "cache.block_size": 4, "cache.num_blocks": 24}
    alone = {"batching.max_num_seqs": 1, "cache.block_size": 16, "cache.num_blocks": 8}
    config = _config()
    tested = {"model.device": device, "model.dtype": "float32", "model.kernels": kernels}
    reference = {"model.device": "cpu", "model.dtype": "float64", "model.kernels": "torch"}
    here = _answers(config, _EXITS | crowded | tested)
    expected = _answers(config, _EXITS | alone | reference)
    wrong = next((name for name, answer in expected.items() if here[name] != answer), None)
    depths = Counter(depth for answer in here.values() if not isinstance(answer, str) for _, depth in answer)
    difference = None if wrong is None else f"{wrong}: {_shown(here[wrong])} for {_shown(expected[wrong])}"
    return SelfTest(dict(sorted(depths.items())), difference)


@torch.inference_mode()
def kernel_test(folder: Path) -> KernelTest:
    """The layers and the vocabulary in bfloat16 by native kernels, against torch in float32 with the same weights.

    Prompts of several lengths run together, and then token by token as in decoding, where each must get the same bits.

    Args:
        folder: where the built library is kept.

    Raises:
        Unavailable: there are no native kernels here.
    """
    config = _config(**_FOR_KERNELS)
    weights = _weights(config, "cpu", "bfloat16")
    by_kernels = Decoder(config, weights, native(config, weights, folder, keep_plain=True))
    in_float32 = Decoder(config, _moved(weights, config, torch.device("cpu"), torch.float32))
    tokens = torch.randint(config.vocab_size, (sum(_LENGTHS),), generator=torch.Generator().manual_seed(3))
    tables = torch.arange(len(_LENGTHS) * (width := -(-max(_LENGTHS) // _BLOCK_SIZE))).view(-1, width)
    batch = TokenBatch.ragged([range(length) for length in _LENGTHS], tables, _BLOCK_SIZE)
    found, by_torch, expected = (
        _logits(decoder, tokens, batch) for decoder in (by_kernels, Decoder(config, weights), in_float32)
    )
    error, torch_error = (((own - expected).norm() / expected.norm()).item() for own in (found, by_torch))
    return KernelTest(error, torch_error, torch.equal(_one_by_one(by_kernels, tokens, tables), found))


def _logits(decoder: Decoder, tokens: Tensor, batch: TokenBatch) -> Tensor:
    hidden, _ = decoder.run(
        range(decoder.num_layers), decoder.embed(tokens), batch, _cache(decoder, batch.block_tables)
    )
    return decoder.logits(hidden)


def _one_by_one(decoder: Decoder, tokens: Tensor, tables: Tensor) -> Tensor:
    """As `_logits`, with one token a step."""
    cache, places = _cache(decoder, tables), [(i, p) for i, length in enumerate(_LENGTHS) for p in range(length)]
    rows = []
    for token, (owner, position) in zip(tokens.split(1), places, strict=True):
        batch = TokenBatch.decode(torch.tensor([position]), tables[owner : owner + 1], _BLOCK_SIZE)
        hidden, _ = decoder.run(range(decoder.num_layers), decoder.embed(token), batch, cache)
        rows.append(decoder.logits(hidden))
    return torch.cat(rows)


def _cache(decoder: Decoder, tables: Tensor) -> Tensor:
    config = decoder.config
    sizes = (config.num_layers, 2, tables.numel(), _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return torch.zeros(sizes, dtype=decoder.dtype)


def _config(**changes: int) -> ModelConfig:
    with TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(_CONFIG | changes), encoding="utf-8")
        return model_config(Path(folder))


def _answers(config: ModelConfig, flags: dict[str, Any]) -> dict[str, Tokens | str]:
    """The tokens of each request, or its error."""
    settings = load_settings(flags=flags, environ={}).settings
    located = Located(
        None, config, Base("self-test", "", config.hidden_size, config.vocab_size, config.num_layers), None
    )
    weights = _weights(config, settings.model.device, settings.model.dtype)
    model = Model(new_decoder(settings.model, config, weights, lambda _: None), NoTokenizer())
    planned = plan_exits(settings, located, lambda _: None)
    engine = build_engine(settings, model, build_runner(settings, model, planned))
    for request in _requests(config):
        engine.add(request)
    answers: dict[str, Tokens | str] = {}
    while engine.has_work:
        answers |= {output.id: _tokens(output) for output in engine.step().finished}
    return answers


def _weights(config: ModelConfig, device: str, dtype: str) -> Weights:
    weights = random_weights(config, torch.float32, torch.device("cpu"), seed=1)
    for tensor in stored(weights).values():
        if tensor.dim() > 1 and tensor.std() > 0:  # not the gains
            tensor.mul_(_GAIN / STANDARD_DEVIATION / tensor.shape[-1] ** 0.5)
    return _moved(weights, config, device_of(device), dtype_of(dtype, dtype))


def _moved(weights: Weights, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    moved = {name: tensor.to(device, dtype) for name, tensor in stored(weights).items()}
    if config.tied:
        moved["lm_head"] = moved["embedding"]
    return Weights(**moved)


def _requests(config: ModelConfig) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    lengths = [3 + 5 * i % 13 for i in range(_PROMPTS)]
    prompts = [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [Request(f"request {i}", prompt_token_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(prompts)]


def _tokens(output: RequestOutput) -> Tokens | str:
    if output.finish_reason is FinishReason.ERROR:
        return output.error or "failed"
    return [(token.token_id, token.layers_executed) for token in output.tokens]


def _shown(answer: Tokens | str) -> str:
    return answer if isinstance(answer, str) else " ".join(f"{token}@{depth}" for token, depth in answer)
