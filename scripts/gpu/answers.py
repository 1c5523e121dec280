"""A small model and its answers, computed in ways that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpu.place import Place
from gpu.report import WrongResultError

from eeinfer.bench.readiness import SimulatedExits
from eeinfer.config.schema import Settings
from eeinfer.core.request import GREEDY, FinishReason, Request, RequestOutput
from eeinfer.engine.build import Located, Model, build_engine, build_runner, dtype_of, new_decoder, plan_exits
from eeinfer.engine.engine import Engine
from eeinfer.exits.files import Base
from eeinfer.model.families import ModelConfig
from eeinfer.model.random_weights import STANDARD_DEVIATION, random_weights
from eeinfer.model.tokenizer import NoTokenizer
from eeinfer.model.weights import stored

SURENESS = 5.0  # factor on logits, so that the best token has a probability worth the name
GAIN = 2.0  # of every matrix, so that each layer matters and the best token mostly wins by far more than rounding


def located(config: ModelConfig, name: str) -> Located:
    """What stands for a model folder where weights are random."""
    return Located(None, config, Base(name, "", config.hidden_size, config.vocab_size, config.num_layers), None)


def small_model(place: Place, settings: Settings, config: ModelConfig) -> Model:
    """A model of the settings' number type and kernels whose weights are always the same."""
    weights = random_weights(config, torch.float32, torch.device("cpu"), seed=1)
    weights.lm_head.mul_(SURENESS)
    for name, tensor in stored(weights).items():
        if not name.endswith("norm"):
            tensor.mul_(GAIN / STANDARD_DEVIATION / tensor.shape[-1] ** 0.5)
    dtype = dtype_of(settings.model.dtype, config.dtype)
    moved = {name: tensor.to(place.device, dtype) for name, tensor in stored(weights).items()}
    return Model(new_decoder(settings.model, config, type(weights)(**moved), lambda _: None), NoTokenizer())


def prompts(config: ModelConfig, lengths: Sequence[int], max_tokens: int) -> list[Request]:
    """Random prompts of these lengths, the same each time, answered greedily and at full length."""
    source = torch.Generator().manual_seed(2)
    sampling = replace(GREEDY, max_tokens=max_tokens, ignore_eos=True)
    drawn = [torch.randint(config.vocab_size, (length,), generator=source).tolist() for length in lengths]
    return [Request(f"prompt-{i}", prompt_token_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(drawn)]


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine answered.

    Attributes:
        engine: that did, with its cache as it was at the end.
        outputs: by request id.
    """

    engine: Engine
    outputs: dict[str, RequestOutput]

    def tokens(self) -> dict[str, list[tuple[int, int]]]:
        """Tokens and layers executed of each answer."""
        return {name: [(t.token_id, t.layers_executed) for t in out.tokens] for name, out in self.outputs.items()}

    def kv(self) -> torch.Tensor:
        """The cache without the blocks that belong to no sequence."""
        return self.engine.runner.cache[:, :, : self.engine.runner.shape.num_blocks]


def engine_of(
    place: Place, settings: Settings, model: Model, config: ModelConfig, rates: dict[int, float] | None
) -> Engine:
    """An engine with nothing in it yet; `rates` decide who leaves, in place of a measure."""
    readiness = None if rates is None else SimulatedExits(rates, seed=3)
    planned = plan_exits(settings, located(config, "small"), lambda _: None)
    runner = build_runner(settings, model, planned, readiness=readiness, capture=place.capture(settings))
    return build_engine(settings, model, runner)


def answer(engine: Engine, requests: Sequence[Request]) -> Answers:
    """Answer all requests.

    Raises:
        WrongResultError: a request failed.
    """
    for request in requests:
        engine.add(request)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.id: output for output in engine.step().finished}
    engine.scheduler.check()
    for name, output in outputs.items():
        if output.finish_reason is FinishReason.ERROR:
            raise WrongResultError(f"{name} failed: {output.error}")
    return Answers(engine, outputs)
