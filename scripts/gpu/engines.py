"""Whole engines against each other: Triton and graphs against plain torch, exits, preemption, and no hidden waits.

Where tokens must be equal in float32, the best of each leads by far more than rounding: by a thousandth of the spread
of the logits at least, at full depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf
from statistics import fmean
from typing import Any

import torch
from gpu.answers import Answers, answer, engine_of, prompts, small_model
from gpu.place import Place, tiny_config
from gpu.report import Cell, Entry, WrongResultError

from eeinfer.calibration.loss import token_losses
from eeinfer.engine.build import Model
from eeinfer.engine.engine import Engine
from eeinfer.model.decoder import Decoder
from eeinfer.model.weights import stored

EAGER = {"model__enforce_eager": True}
KV_ERROR = 5e-4  # of a layer in float32: sums in another order, over as many layers as the small model has
MORE_LOSS = 0.05  # share of tokens


class Trial:
    """The small model, its prompts, and its engines.

    Attributes:
        kernels: of the engines on trial.
        exits: as counts of layers run.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.kernels = place.kernels
        self.config = tiny_config(dry=place.dry)
        lengths = (3, 9, 14, 12) if place.dry else (3, 17, 64, 5, 130, 33, 48, 11, 26, 90, 7)
        self.requests = prompts(self.config, lengths, 6 if place.dry else 40)
        middle = self.config.num_layers // 3
        self.exits = (middle, 2 * middle)
        self._models: dict[tuple[str, str], Model] = {}

    def model(self, kernels: str, dtype: str) -> Model:
        """The model in a number type; what computes its layers differs, its weights do not."""
        if (kernels, dtype) not in self._models:
            settings = self.place.settings(model__kernels=kernels, model__dtype=dtype)
            self._models[kernels, dtype] = small_model(self.place, settings, self.config)
        return self._models[kernels, dtype]

    def ours(self, dtype: str = "float32", rates: dict[int, float] | None = None, **flags: Any) -> Answers:
        """What the engine on trial answers, with graphs unless `flags` say otherwise; `rates` decide who leaves."""
        return answer(self.engine(self.kernels, dtype, rates, **flags), self.requests)

    def plain(self, dtype: str = "float32", rates: dict[int, float] | None = None, **flags: Any) -> Answers:
        """What plain torch answers, without graphs."""
        return answer(self.engine("torch", dtype, rates, **EAGER, **flags), self.requests)

    def engine(self, kernels: str, dtype: str, rates: dict[int, float] | None, **flags: Any) -> Engine:
        """An engine of these settings."""
        sections = {
            "model__kernels": kernels,
            "model__dtype": dtype,
            "cache__block_size": 16,
            "cache__num_blocks": 96,
            "batching__max_num_seqs": 8,
            "batching__max_num_batched_tokens": 96,
            **flags,
        }
        settings = self.place.settings(**sections)
        return engine_of(self.place, settings, self.model(kernels, dtype), self.config, rates)

    def split(self) -> dict[str, Any]:
        """Settings under which rows leave at two exits."""
        return {"batching__strategy": "split", "exits__layers": self.exits, "exits__threshold": 0.5}

    def rates(self) -> dict[int, float]:
        """Rates of simulated exits, cumulative."""
        return dict(zip(self.exits, (0.3, 0.6), strict=True))


def cells(place: Place) -> Iterator[Cell]:
    """The cells."""
    trial = Trial(place)
    yield Cell("engine: torch on the device against float64", 10, lambda: _self_test(place))
    yield Cell("engine: graphs against eager", 10, lambda: _graphs(trial))
    yield Cell("engine: triton and graphs against torch", 10, lambda: _torch(trial))
    yield Cell("engine: exits by confidence", 10, lambda: _confidence(trial))
    yield Cell("engine: bfloat16, teacher-forced", 10, lambda: _bfloat16(trial))
    yield Cell("engine: no hidden waits", 5, lambda: _syncs(trial))
    yield Cell("engine: preemption and replay", 5, lambda: _preemption(trial))


def _self_test(place: Place) -> Entry:
    from eeinfer.engine.self_test import self_test

    outcome = self_test(str(place.device))
    if not outcome.passed:
        raise WrongResultError(f"self-test: {outcome.difference or 'no token left early'}")
    return {"depths": outcome.depths, "line": f"tokens by layers executed {outcome.depths}"}


def _graphs(trial: Trial) -> Entry:
    """The same kernels with and without graphs: tokens, depths and KV, for every strategy that has its own graphs."""
    told: dict[str, float] = {}
    cases: dict[str, tuple[dict[str, Any], dict[int, float] | None]] = {
        "full": ({"batching__strategy": "full"}, None),
        "split": (trial.split(), trial.rates()),
        "all-exit": (trial.split() | {"batching__strategy": "all-exit"}, {trial.exits[0]: 0.8, trial.exits[1]: 0.9}),
        "copied KV": (trial.split() | {"exits__completion": "copy"}, trial.rates()),
        "by margin": (trial.split() | {"exits__measure": "margin"}, trial.rates()),
    }
    for name, (flags, rates) in cases.items():
        graphs, eager = (trial.ours(rates=rates, **flags, **how) for how in ({}, EAGER))
        if graphs.engine.runner.graphs is None or eager.engine.runner.graphs is not None:
            raise WrongResultError(f"graphs against eager, {name}: both engines have graphs, or neither has")
        told[name] = _agree(graphs, eager, f"graphs against eager, {name}")
    sampling = replace(trial.requests[0].sampling, temperature=0.8, top_p=0.9, logprobs=2)
    drawn = [replace(request, sampling=replace(sampling, seed=i)) for i, request in enumerate(trial.requests)]
    graphs, eager = (
        answer(trial.engine(trial.kernels, "float32", trial.rates(), **trial.split(), **how), drawn)
        for how in ({}, EAGER)
    )
    told["sampled"] = _agree(graphs, eager, "graphs against eager, sampled")
    return {"kv_errors": told, "line": f"tokens and depths equal, KV within {max(told.values()):.1e}"}


def _torch(trial: Trial) -> Entry:
    """The whole path against the plainest one. A dry run interprets kernels here, for two short answers."""
    requests = prompts(trial.config, (3, 9), 3) if trial.place.dry else trial.requests
    told = {}
    for name, flags, rates in (("full", {"batching__strategy": "full"}, None), ("split", trial.split(), trial.rates())):
        flags |= {"batching__max_num_seqs": 2 if trial.place.dry else 8}
        ours = answer(trial.engine("triton", "float32", rates, **flags), requests)
        theirs = answer(trial.engine("torch", "float32", rates, **flags, **EAGER), requests)
        told[name] = _agree(ours, theirs, f"triton and graphs against torch, {name}")
    return {"kv_errors": told, "line": f"tokens and depths equal in float32, KV within {max(told.values()):.1e}"}


def _confidence(trial: Trial) -> Entry:
    """Exits that look at the rows: the verdict comes from the device. Half of the first tokens can leave."""
    told = {}
    for measure in ("max-prob", "entropy", "similarity"):
        flags = trial.split() | {"exits__measure": measure}
        everybody = trial.plain(**flags | {"exits__threshold": -inf})
        found = [t.confidence for out in everybody.outputs.values() for t in out.tokens if t.confidence is not None]
        flags["exits__threshold"] = _between(found)
        ours = trial.ours(**flags)
        _agree(ours, trial.plain(**flags), f"exits by {measure}")
        told[measure] = _depths(ours)
        if len(told[measure]) == 1:
            raise WrongResultError(f"exits by {measure}: all tokens have {told[measure]} layers, so little was tested")
    return {"depths": told, "line": "tokens and depths equal, " + "; ".join(f"{m} {d}" for m, d in told.items())}


def _bfloat16(trial: Trial) -> Entry:
    """Answers in bfloat16, judged token by token by the same weights in float32 on the same tokens before.

    Random layers blow rounding up, so what is allowed is what plain torch in bfloat16 loses, and a little more.
    """
    weights = trial.model("torch", "bfloat16").decoder.weights
    judge = Decoder(trial.config, type(weights)(**{name: tensor.float() for name, tensor in stored(weights).items()}))

    def loss(answers: Answers) -> tuple[float, float]:
        tokens = answers.tokens()
        pairs = [(r.prompt_token_ids or (), [token for token, _ in tokens[r.id]]) for r in trial.requests]
        losses = [one for one in token_losses(judge, pairs, ()) if one is not None]
        return fmean(one.loss for one in losses), fmean(one.strict_loss for one in losses)

    (ours, ours_strictly), (theirs, theirs_strictly) = (
        loss(answers("bfloat16", batching__strategy="full")) for answers in (trial.ours, trial.plain)
    )
    if ours > theirs + MORE_LOSS or ours_strictly > theirs_strictly + MORE_LOSS:
        raise WrongResultError(
            f"bfloat16: {ours:.1%} of the tokens are not those of the same model in float32 ({ours_strictly:.1%} "
            f"strictly); plain torch in bfloat16 loses {theirs:.1%} ({theirs_strictly:.1%})"
        )
    return {
        "loss": ours,
        "strict_loss": ours_strictly,
        "torch_loss": theirs,
        "torch_strict_loss": theirs_strictly,
        "line": f"{1 - ours_strictly:.1%} of the tokens are those of float32 ({1 - ours:.1%} but for ties); "
        f"with plain torch {1 - theirs_strictly:.1%} ({1 - theirs:.1%})",
    }


def _syncs(trial: Trial) -> Entry:
    """Decode steps in which any wait but that for a verdict raises an error."""
    steps = Counter[str]()
    short = [replace(r, prompt_token_ids=(r.prompt_token_ids or ())[:8]) for r in trial.requests[:8]]
    engine = trial.engine(trial.kernels, "bfloat16", trial.rates(), **trial.split())
    for request in short:
        engine.add(request)
    while engine.has_work and engine.step().kind == "prefill":
        pass
    with _no_syncs(trial.place):
        while engine.has_work:
            steps[engine.step().kind] += 1
    if not {"pass", "complete"} <= set(steps):
        raise WrongResultError(f"no hidden waits: only {dict(steps)} were run, so little was tested")
    if trial.place.dry:
        return {"steps": steps, "line": f"{dict(steps)} steps ran; without a GPU no wait could be seen"}
    return {"steps": steps, "line": f"{dict(steps)} steps without a wait but for verdicts"}


@contextmanager
def _no_syncs(place: Place) -> Iterator[None]:
    if place.device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _preemption(trial: Trial) -> Entry:
    """A cache too small for all: sequences lose their blocks and are replayed at the depths they had."""
    size, requests = (4, prompts(trial.config, (5, 6, 7), 14)) if trial.place.dry else (16, trial.requests)
    longest = max(len(r.prompt_token_ids or ()) + (r.sampling.max_tokens or 0) for r in requests)
    flags = trial.split() | {"cache__block_size": size}
    roomy, tight = (
        answer(trial.engine(trial.kernels, "float32", trial.rates(), **flags, cache__num_blocks=blocks), requests)
        for blocks in (96, -(-longest // size) + 1)
    )
    replays = tight.engine.stats.preemptions
    if not replays:
        raise WrongResultError("preemption: none happened, so nothing was tested")
    _equal(tight.tokens(), roomy.tokens(), "preemption")
    return {"preemptions": replays, "line": f"{replays} replays, same answers"}


def _between(values: list[float]) -> float:
    """A threshold that part of the values reach, in their widest gap: rounding must not decide who leaves."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 4 : -(len(ordered) // 4)]
    _, below, above = max((b - a, a, b) for a, b in pairwise(middle))
    return (below + above) / 2


def _depths(answers: Answers) -> dict[int, int]:
    return dict(sorted(Counter(depth for own in answers.tokens().values() for _, depth in own[1:]).items()))


def _agree(ours: Answers, theirs: Answers, what: str) -> float:
    """Tokens, depths and KV must agree; returns how far KV is off in the worst layer."""
    _equal(ours.tokens(), theirs.tokens(), what)
    one, other = (a.kv().flatten(2).double() for a in (ours, theirs))
    scale = torch.linalg.vector_norm(other, dim=-1).clamp_min(1e-30)
    error = float((torch.linalg.vector_norm(one - other, dim=-1) / scale).max())
    if not error <= KV_ERROR:
        raise WrongResultError(f"{what}: tokens agree, but the KV of a layer is off by {error:.1e}")
    return error


def _equal(ours: Mapping[str, list[tuple[int, int]]], theirs: Mapping[str, list[tuple[int, int]]], what: str) -> None:
    for name, expected in theirs.items():
        if ours[name] == expected:
            continue
        at = next((i for i, pair in enumerate(zip(ours[name], expected, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            raise WrongResultError(f"{what}: {name} has {len(ours[name])} tokens for {len(expected)}")
        (token, depth), (other, other_depth) = ours[name][at], expected[at]
        raise WrongResultError(
            f"{what}: token {at} of {name} is {token} after {depth} layers, should be {other} after {other_depth}"
        )
