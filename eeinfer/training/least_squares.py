"""Closed-form exit heads: the linear map from an exit's hidden state to the final one, fitted by least squares.

With x = rms(h_exit) and y = rms(h_final) over tokens of the model's own answers, A minimises the sum of |A x - y|^2
plus a small ridge (Din et al., arXiv 2303.09435, with both sides normalised). The head is `linear`: W (rms(A x) *
final norm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from eeinfer.config.load import Loaded
from eeinfer.engine.build import head_on
from eeinfer.engine.llm import LLM
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.exits.files import HeadsFile, save_heads
from eeinfer.exits.heads import ExitHead, ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig
from eeinfer.ops.norm import rms_norm
from eeinfer.training.answers import full_depth
from eeinfer.training.output import prepare, write_settings
from eeinfer.training.prompts import data_record, held_out, read_requests
from eeinfer.training.selective import MIN_LEAVING, PRECISION, smallest_threshold
from eeinfer.training.traces import Answered, answer_all, hidden_states

RIDGE = 1e-4


@dataclass(frozen=True, slots=True)
class ExitResult:
    """Figures of one exit on held-out prompts.

    Attributes:
        layers_executed: layers run before it.
        bare_agreement: share of tokens where the model's own head, applied here, picks the full model's token.
        agreement: the same for the fitted head.
        threshold: smallest max-prob above which `PRECISION` of the tokens that reach this exit agree; inf if there is
            none.
        leaving: share of all tokens that leave here at these thresholds.
    """

    layers_executed: int
    bare_agreement: float
    agreement: float
    threshold: float
    leaving: float


def tune(
    resolve: Callable[[Path | None], Loaded],
    *,
    prompts: Path | BinaryIO,
    exits: Sequence[int],
    output: Path,
    num_prompts: int | None,
    note: Callable[[str], None],
) -> list[ExitResult]:
    """Fit a head for each exit and write the heads, with thresholds for them, to `output`.

    Args:
        resolve: loads the settings (see `LLM.from_loaded`); the strategy is always full depth.
        prompts: JSONL of prompts, as a file or an open binary stream.
        exits: layers executed, increasing.
        output: folder to write; made if missing.
        num_prompts: only the first so many.
        note: called with one-line notices.

    Raises:
        EeinferError: settings, model or prompts cannot be used.
    """
    prepare(output)
    requests = read_requests(prompts, num_prompts, note)
    llm = LLM.from_loaded(lambda packaged: full_depth(resolve(packaged)), note=note)
    decoder = llm.engine.runner.decoder
    check_norm(decoder.config)
    check_exits(exits, decoder.num_layers)
    answers = answer_all(llm, requests, note)
    train = [a for a in answers if not held_out(a.id)]
    dev = [a for a in answers if held_out(a.id)]
    if not train or not dev:
        raise EeinferError(f"{len(answers)} answered prompts are too few to fit and judge heads; give some hundreds")
    maps, tokens = fit(decoder, train, exits)
    note(f"fitted {len(exits)} heads to {tokens} tokens of {len(train)} answers; judging them on {len(dev)} others")
    norm = decoder.weights.final_norm.to("cpu", torch.bfloat16)
    heads = HeadsFile(
        tuple(ExitSpec(n, "linear") for n in exits),
        tuple({"linear.weight": a, "norm.weight": norm.clone()} for a in maps),
    )
    results = judge(decoder, dev, heads)
    if all(result.threshold == inf for result in results):
        note(
            f"no threshold keeps {PRECISION:.0%} of at least {MIN_LEAVING} held-out tokens: all are inf and nothing "
            f"would leave early; give more prompts, or choose --threshold yourself"
        )
    header = {
        "method": "least-squares",
        "ridge": RIDGE,
        "max_tokens": llm.settings.sampling.max_tokens,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "fitted_tokens": tokens,
        **data_record(requests, answers),
    }
    save_heads(output, llm.located.base, heads, header=header, results=[asdict(result) for result in results])
    write_settings(output, exits, "max-prob", [result.threshold for result in results])
    return results


def check_norm(config: ModelConfig) -> None:
    """See that the formulas of heads fit the model.

    Raises:
        ConfigError: it has layer norms, whose biases heads lack.
    """
    if config.norm != "rms":
        raise ConfigError(
            "tune-heads makes heads for models with RMS norms, and this one has layer norms; leave early with the "
            "model's own norm and head instead: generate --exits N,… --threshold T"
        )


def check_exits(exits: Sequence[int], num_layers: int) -> None:
    """See that heads can go there.

    Raises:
        ConfigError: exits are out of order, repeated or outside the model.
    """
    if not exits or list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] >= num_layers:
        raise ConfigError(f"--exits must be increasing counts of layers in 1 … {num_layers - 1}, got {list(exits)}")


def fit(decoder: Decoder, answers: Sequence[Answered], exits: Sequence[int]) -> tuple[list[Tensor], int]:
    """The map A of each exit, bfloat16 [d, d] on the CPU, fitted in float64, and the number of tokens fitted to."""
    maps, tokens = solve(hidden_states(decoder, answers, [*exits, decoder.num_layers]), decoder.config.norm_eps)
    return [a.to(torch.bfloat16).contiguous() for a in maps], tokens


def solve(groups: Iterable[Sequence[Tensor]], eps: float) -> tuple[Tensor, int]:
    """Least-squares maps from hidden states, accumulated and solved in float64.

    Args:
        groups: pieces of the data; each holds the states at the k exits and then the final ones, [n, d] each.
        eps: of the model's norms.

    Returns:
        A of each exit, [k, d, d] on the CPU, and the number of tokens.
    """
    squares, products, tokens = torch.zeros(()), torch.zeros(()), 0
    for *states, final in groups:
        y = rms_norm(final.float(), None, eps)
        xs = [rms_norm(state.float(), None, eps) for state in states]
        squares = squares + torch.stack([x.T @ x for x in xs]).to("cpu", torch.float64)
        products = products + torch.stack([x.T @ y for x in xs]).to("cpu", torch.float64)
        tokens += len(y)
    identity = torch.eye(squares.shape[-1], dtype=torch.float64)
    ridge = RIDGE * squares.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None] * identity
    return torch.linalg.solve(squares + ridge, products).transpose(1, 2), tokens


def judge(decoder: Decoder, answers: Sequence[Answered], heads: HeadsFile) -> list[ExitResult]:
    """Agreement of each head with the full model, and thresholds that keep `PRECISION` at every exit in turn."""
    bare = [head_on(decoder, ExitSpec(spec.layers_executed, "shared"), {}) for spec in heads.specs]
    fitted = [head_on(decoder, spec, own) for spec, own in zip(heads.specs, heads.tensors, strict=True)]
    agree_bare, agree, confidence = [], [], []
    for *states, final in hidden_states(decoder, answers, [*(h.layers_executed for h in fitted), decoder.num_layers]):
        target = decoder.logits(final).argmax(dim=-1)
        agree_bare.append(torch.stack([_predict(h, s)[0] == target for h, s in zip(bare, states, strict=True)]))
        predicted = [_predict(h, s) for h, s in zip(fitted, states, strict=True)]
        agree.append(torch.stack([token == target for token, _ in predicted]))
        confidence.append(torch.stack([probability for _, probability in predicted]))
    layers = [head.layers_executed for head in fitted]
    return _results(layers, *(torch.cat(parts, dim=1) for parts in (agree_bare, agree, confidence)))


def _results(layers: list[int], bare: Tensor, agree: Tensor, confidence: Tensor) -> list[ExitResult]:
    results, here = [], torch.ones_like(agree[0])
    for i, n in enumerate(layers):
        threshold = smallest_threshold(confidence[i][here], agree[i][here])
        leaves = here & (confidence[i] >= threshold)
        here = here & ~leaves
        figures = (bare[i].double().mean(), agree[i].double().mean(), leaves.double().mean())
        bare_share, share, leaving = (round(float(x), 4) for x in figures)
        results.append(ExitResult(n, bare_share, share, threshold, leaving))
    return results


def _predict(head: ExitHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    probability, token = head.logits(hidden).float().softmax(dim=-1).max(dim=-1)
    return token.cpu(), probability.cpu()
