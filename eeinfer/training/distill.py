"""Distillation of exit heads: each is trained to give the distribution that the model itself ends with.

The loss of a head is the mean over tokens of KL(model || head). Most of the training looks at the tokens that the
model finds likely, which is several times cheaper than the whole vocabulary; the last part looks at all of them, so
that the sum under a probability is right. Heads do not share anything, so each has an optimizer and a best state of its
own. When none gets better any more the run ends early. Batches are a function of the step's number alone: a run that
goes on from a checkpoint sees the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import cos, pi
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from eeinfer.model.decoder import Decoder
from eeinfer.training.checkpoints import Progress, resume, save
from eeinfer.training.modules import TrainableHead
from eeinfer.training.options import Options
from eeinfer.training.states import pieces

EVALUATIONS = 12  # in a run
PATIENCE = 3  # evaluations without a better one on dev, of every head, after which the run ends
WARM_UP = 100  # steps, or a fifth of a shorter run
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.98)
MAX_NORM = 1.0  # of a head's gradient
_MOST_LOGITS = 2**25  # held at a time, for one head
_DEV_TOKENS = 8192  # looked at in an evaluation, spread over the split
_LIKELY = 8  # tokens of each position that count as likely


def distill(
    accelerator: Accelerator,
    decoder: Decoder,
    heads: Sequence[TrainableHead],
    states: dict[str, Tensor],
    options: Options,
    seed: int,
    folder: Path,
    note: Callable[[str], None],
) -> list[dict[str, Tensor]]:
    """Train all heads; on every process of the run alike.

    Args:
        accelerator: of this process.
        decoder: the model.
        heads: with their initial tensors, in the order of the exits.
        states: `train` and `dev`, [k + 1, n, d]: at each exit and at the end.
        options: how long and how fast.
        seed: of the order of the tokens.
        folder: of the checkpoints; a run goes on from the latest there.
        note: called with one-line notices.

    Returns:
        The best tensors of each head on dev, by the names of the file.
    """
    run = _Run(accelerator, decoder, heads, states, options, seed)
    progress = resume(accelerator, folder) or run.evaluated(Progress.start(run.heads), note)
    if progress.step:
        note(f"going on after step {progress.step} of {run.total}, from {folder}")
    while progress.step < run.total and not progress.stopped:
        run.step(progress.step)
        progress.step += 1
        if progress.step % run.interval == 0 or progress.step == run.total:
            progress = run.evaluated(progress, note)
            save(accelerator, folder, progress)
    if progress.step < run.total:
        note(f"stopped after step {progress.step} of {run.total}: no head got better in {PATIENCE} evaluations")
    return progress.best


class _Run:
    """The modules, optimizers and data of one run."""

    def __init__(
        self,
        accelerator: Accelerator,
        decoder: Decoder,
        heads: Sequence[TrainableHead],
        states: dict[str, Tensor],
        options: Options,
        seed: int,
    ) -> None:
        self.accelerator, self.decoder, self.options = accelerator, decoder, options
        self.seed = seed
        self.train, self.dev = states["train"], spread(states["dev"], _DEV_TOKENS)
        for head in heads:
            head.to(decoder.device)
        optimizers = [
            torch.optim.AdamW(head.parameters(), lr=options.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
            for head in heads
        ]
        self.modules: list[nn.Module] = [accelerator.prepare(head) for head in heads]
        self.optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
        self.heads: list[TrainableHead] = [accelerator.unwrap_model(module) for module in self.modules]
        self.whole = decoder.weights.lm_head
        self.reduced = self.whole
        if 0 < options.candidates < len(self.whole) and options.full_vocabulary_share < 1:
            self.reduced = self.whole[likely_tokens(decoder, self.train[-1], options.candidates)]
        self.batch = max(accelerator.num_processes, min(options.batch_tokens, self.train.shape[1]))
        self.total = max(1, round(options.epochs * self.train.shape[1] / self.batch))
        self.interval = max(1, self.total // EVALUATIONS)

    def step(self, number: int) -> None:
        """One step of all heads."""
        late = number >= self.total * (1 - self.options.full_vocabulary_share)
        vocabulary = self.whole if late else self.reduced
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.lr * rate(number, self.total)
        processes = self.accelerator.num_processes
        rows = batch_rows(self.train.shape[1], self.batch, number, self.seed)
        rows = rows[: len(rows) // processes * processes][self.accelerator.process_index :: processes]
        for part in rows.split(max(1, _MOST_LOGITS // len(vocabulary))):
            target = self._target(self.train[-1, part], vocabulary)
            wanted = target.exp()
            floor = torch.dot(wanted.flatten(), target.flatten())
            for module, state in zip(self.modules, self.train[:-1], strict=True):
                logs = self._logs(module, state[part], vocabulary)
                # KL as one product, without copies of all logits.
                loss = (floor - torch.dot(wanted.flatten(), logs.flatten())) / len(rows)
                self.accelerator.backward(loss)
        self.accelerator.unscale_gradients()
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluated(self, progress: Progress, note: Callable[[str], None]) -> Progress:
        """Judge all heads on dev, each process its share, and keep what got better."""
        sums = torch.zeros(len(self.heads), 2, dtype=torch.float64)
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        for piece in pieces(self.dev[:, index::processes], max(1, _MOST_LOGITS // len(self.whole))):
            target = self._target(piece[-1], self.whole)
            for i, state in enumerate(piece[:-1]):
                # The bare module: a wrapped one would wait for the other processes.
                logs = self._logs(self.heads[i], state, self.whole)
                sums[i, 0] += float(F.kl_div(logs, target, log_target=True, reduction="sum"))
                sums[i, 1] += float((logs.argmax(-1) == target.argmax(-1)).sum())
        sums = self.accelerator.reduce(sums.to(self.decoder.device), "sum").cpu()
        kl, agreement = (sums / self.dev.shape[1]).unbind(1)
        found = progress.with_losses(kl.tolist(), self.heads, PATIENCE)
        words = ", ".join(
            f"{head.spec.layers_executed}: {loss:.3f} ({share:.1%})"
            for head, loss, share in zip(self.heads, kl.tolist(), agreement.tolist(), strict=True)
        )
        note(f"step {progress.step} of {self.total}, KL (agreement) on dev by exit: {words}")
        return found

    @torch.no_grad()
    def _target(self, final: Tensor, vocabulary: Tensor) -> Tensor:
        return self._log_softmax(self.decoder.final_norm(final.to(self.decoder.device)), vocabulary)

    def _logs(self, module: nn.Module, hidden: Tensor, vocabulary: Tensor) -> Tensor:
        return self._log_softmax(module(hidden.to(self.decoder.device)), vocabulary)

    def _log_softmax(self, normed: Tensor, vocabulary: Tensor) -> Tensor:
        """Log-probabilities in float32 or wider; the product is computed in the model's own type, as when serving."""
        logits = self.decoder.capped(F.linear(normed.to(vocabulary.dtype), vocabulary))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def spread(states: Tensor, most: int) -> Tensor:
    """At most so many tokens of [ends, n, d], evenly spread over n."""
    return states[:, :: max(1, -(-states.shape[1] // most))]


def rate(step: int, total: int) -> float:
    """Share of the highest learning rate at a step: a linear warm-up, then half a cosine down to 0."""
    warm = max(1, min(WARM_UP, total // 5))
    return min((step + 1) / warm, 0.5 + 0.5 * cos(pi * max(0, step - warm) / max(1, total - warm)))


def batch_rows(tokens: int, batch: int, step: int, seed: int) -> Tensor:
    """Rows of one step's tokens, increasing: in each epoch all tokens once, in an order of its own."""
    epoch, place = divmod(step, tokens // batch)
    return _order(tokens, seed + epoch)[place * batch : (place + 1) * batch].sort().values


@lru_cache(maxsize=1)
def _order(tokens: int, seed: int) -> Tensor:
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def likely_tokens(decoder: Decoder, final: Tensor, count: int) -> Tensor:
    """The `count` tokens, increasing, that are most often among the `_LIKELY` likeliest at the positions of `final`.

    Args:
        decoder: the model.
        final: [n, d] hidden states after the last layer.
        count: how many.
    """
    vocab_size = len(decoder.weights.lm_head)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens in _likely(decoder, final):
        counts += torch.bincount(tokens.flatten().cpu(), minlength=vocab_size)
    return counts.topk(count).indices.sort().values.to(decoder.device)


def _likely(decoder: Decoder, final: Tensor) -> Iterator[Tensor]:
    for part in final.split(max(1, _MOST_LOGITS // len(decoder.weights.lm_head))):
        yield decoder.logits(part.to(decoder.device)).topk(_LIKELY, dim=-1).indices
