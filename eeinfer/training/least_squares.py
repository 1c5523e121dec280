"""Closed-form exit heads: the linear map from an exit's hidden state to the final one, fitted by least squares.

With x = rms(h_exit) and y = rms(h_final) over tokens of the model's own answers, A minimises the sum of |A x - y|^2
plus a small ridge (Din et al., arXiv 2303.09435, with both sides normalised). The head is `linear`: W (rms(A x) *
final norm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b, sha256
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import tomli_w
import torch
from torch import Tensor

from eeinfer.config.load import Loaded
from eeinfer.core.request import Request
from eeinfer.engine.build import PACKAGED_SETTINGS, head_on
from eeinfer.engine.llm import LLM
from eeinfer.engine.prompt_file import LineError, read_prompt_file
from eeinfer.errors import ConfigError, EeinferError
from eeinfer.exits.files import HeadsFile, save_heads
from eeinfer.exits.heads import ExitHead, ExitSpec
from eeinfer.model.decoder import Decoder
from eeinfer.ops.norm import rms_norm
from eeinfer.training.traces import Answered, answer_all, hidden_states

DEV_SHARE = 0.1
RIDGE = 1e-4
PRECISION = 0.98
_MIN_LEAVING = 50  # tokens above a threshold, below which its precision says nothing


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
    _prepare(output)
    requests = _requests(prompts, num_prompts, note)
    llm = LLM.from_loaded(lambda packaged: _full_depth(resolve(packaged)), note=note)
    decoder = llm.engine.runner.decoder
    if not exits or list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] >= decoder.num_layers:
        allowed = f"increasing counts of layers in 1 … {decoder.num_layers - 1}"
        raise ConfigError(f"--exits must be {allowed}, got {list(exits)}")
    answers = answer_all(llm, requests, note)
    train = [a for a in answers if not _held_out(a.id)]
    dev = [a for a in answers if _held_out(a.id)]
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
            f"no threshold keeps {PRECISION:.0%} of at least {_MIN_LEAVING} held-out tokens: all are inf and nothing "
            f"would leave early; give more prompts, or choose --threshold yourself"
        )
    header = {
        "method": "least-squares",
        "ridge": RIDGE,
        "max_tokens": llm.settings.sampling.max_tokens,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "prompts": len(answers),
        "fitted_tokens": tokens,
        "data_fingerprint": _data_fingerprint(answers),
    }
    save_heads(output, llm.located.base, heads, header=header, results=[asdict(result) for result in results])
    _write_settings(output / PACKAGED_SETTINGS, results)
    return results


def fit(decoder: Decoder, answers: Sequence[Answered], exits: Sequence[int]) -> tuple[list[Tensor], int]:
    """The map A of each exit, bfloat16 [d, d] on the CPU, fitted in float64, and the number of tokens fitted to."""
    d, eps = decoder.config.hidden_size, decoder.config.norm_eps
    squares = torch.zeros(len(exits), d, d, dtype=torch.float64)
    products = torch.zeros(len(exits), d, d, dtype=torch.float64)
    tokens = 0
    for *states, final in hidden_states(decoder, answers, [*exits, decoder.num_layers]):
        y = rms_norm(final.float(), None, eps)
        tokens += len(y)
        for i, state in enumerate(states):
            x = rms_norm(state.float(), None, eps)
            squares[i] += (x.T @ x).cpu()
            products[i] += (x.T @ y).cpu()
    ridge = RIDGE * squares.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None] * torch.eye(d, dtype=torch.float64)
    maps = torch.linalg.solve(squares + ridge, products).transpose(1, 2)
    return [a.to(torch.bfloat16).contiguous() for a in maps], tokens


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


def smallest_threshold(confidence: Tensor, agree: Tensor) -> float:
    """Smallest threshold (four digits, rounded up) with precision `PRECISION` among the tokens at or above it.

    Args:
        confidence: [n].
        agree: [n] bool, whether the token is the full model's.
    """
    ordered, order = confidence.sort(descending=True)
    counts = torch.arange(1, len(order) + 1)
    precision = agree[order].double().cumsum(0) / counts
    # Equals leave together, so only the last of them can be where to stop.
    last_of_equals = torch.cat((ordered[:-1] > ordered[1:], torch.ones(1, dtype=torch.bool)))
    enough = (precision >= PRECISION) & (counts >= _MIN_LEAVING) & last_of_equals
    if not enough.any():
        return inf
    lowest = ordered[enough.nonzero()[-1]].double()
    return min(1.0, float((lowest * 1e4).ceil() / 1e4))


def _predict(head: ExitHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    probability, token = head.logits(hidden).float().softmax(dim=-1).max(dim=-1)
    return token.cpu(), probability.cpu()


def _prepare(output: Path) -> None:
    """Make the folder and see that it takes files, before the long work."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=output).close()
    except OSError as error:
        raise EeinferError(f"--output {output}: cannot write there ({error.strerror}); name another folder") from None


def _full_depth(loaded: Loaded) -> Loaded:
    settings = loaded.settings
    return replace(loaded, settings=replace(settings, batching=replace(settings.batching, strategy="full")))


def _requests(prompts: Path | BinaryIO, num_prompts: int | None, note: Callable[[str], None]) -> list[Request]:
    lines = read_prompt_file(prompts, limit=num_prompts)
    bad = [line for line in lines if isinstance(line, LineError)]
    if bad:
        note(f"{len(bad)} unusable lines are left out; the first: {bad[0].message}")
    return [line for line in lines if isinstance(line, Request)]


def _held_out(request_id: str) -> bool:
    """A tenth of the prompts, by a hash of their id, so that the split does not depend on their order or number."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big") < DEV_SHARE * 2**64


def _data_fingerprint(answers: Sequence[Answered]) -> str:
    digest = sha256()
    for answer in sorted(answers, key=lambda a: a.id):
        digest.update(repr((answer.id, answer.tokens)).encode())
    return "sha256:" + digest.hexdigest()


def _write_settings(path: Path, results: Sequence[ExitResult]) -> None:
    table: dict[str, Any] = {
        "exits": {
            "layers": [result.layers_executed for result in results],
            "measure": "max-prob",
            "threshold": [result.threshold for result in results],
        }
    }
    comment = (
        f"# Thresholds at which, on held-out prompts, {PRECISION:.0%} of the tokens that leave agree with the full\n"
        f"# model's. They carry no statistical guarantee.\n"
    )
    path.write_text(comment + tomli_w.dumps(table), encoding="utf-8")
