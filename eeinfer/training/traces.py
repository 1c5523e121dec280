"""Hidden states of the model on its own answers: what exit heads are fitted to and judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eeinfer.core.request import FinishReason, Request, RequestOutput
from eeinfer.engine.encode import encode
from eeinfer.engine.llm import LLM
from eeinfer.errors import RequestError
from eeinfer.model.decoder import Decoder
from eeinfer.ops.token_batch import TokenBatch

_BLOCK = 64
_GROUP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and the model's own answer, as token ids.

    `first` is the index of the token that predicted the answer's first one.
    """

    id: str
    tokens: tuple[int, ...]
    first: int


def answer_all(llm: LLM, requests: Sequence[Request], note: Callable[[str], None]) -> list[Answered]:
    """Let the model answer. `note` hears of every tenth of the way, and of requests that fail, which are left out."""
    prompts: dict[str, tuple[int, ...]] = {}
    done = 0

    def keep_prompt(request: Request) -> Request:
        try:
            prompts[request.id] = tuple(encode(request, llm.engine.tokenizer, llm.located.config.vocab_size))
        except RequestError:
            return request  # fails again, alone, in generate
        return replace(request, prompt=None, messages=None, prompt_token_ids=prompts[request.id])

    def report(_: RequestOutput) -> None:
        nonlocal done
        done += 1
        if done * 10 // len(requests) > (done - 1) * 10 // len(requests):
            note(f"answered {done} of {len(requests)} prompts, {llm.stats.tokens_per_second:.0f} tokens/s")

    outputs = llm.generate([keep_prompt(request) for request in requests], on_output=report)
    note_failures([(o.id, o.error or "failed") for o in outputs if o.finish_reason is FinishReason.ERROR], note)
    return [
        # The last generated token predicts nothing that was kept.
        Answered(o.id, (*prompts[o.id], *(t.token_id for t in o.tokens[:-1])), len(prompts[o.id]) - 1)
        for o in outputs
        if o.finish_reason is not FinishReason.ERROR
    ]


def note_failures(failures: Sequence[tuple[str, str]], note: Callable[[str], None]) -> None:
    """One line about requests that are left out: how many, and the first with its reason."""
    if failures:
        name, why = failures[0]
        note(f"{len(failures)} prompts cannot be answered and are left out; the first, {name}: {why}")


def hidden_states(decoder: Decoder, answers: Sequence[Answered], ends: Sequence[int]) -> Iterator[list[Tensor]]:
    """Hidden states at each of `ends` (layers executed), for the tokens that predicted an answer token.

    Answers are run in groups of at most 4,096 tokens (or one answer), so memory stays bounded.

    Yields:
        For each group, one [n, d] tensor an end.
    """
    for group in _grouped(answers):
        yield list(_run_group(decoder, group, ends))


def _grouped(answers: Sequence[Answered]) -> Iterator[list[Answered]]:
    group: list[Answered] = []
    for answer in answers:
        if group and sum(len(a.tokens) for a in group) + len(answer.tokens) > _GROUP_TOKENS:
            yield group
            group = []
        group.append(answer)
    if group:
        yield group


@torch.inference_mode()
def _run_group(decoder: Decoder, group: list[Answered], ends: Sequence[int]) -> Iterator[Tensor]:
    config, device = decoder.config, decoder.device
    widths = [-(-len(a.tokens) // _BLOCK) for a in group]
    starts = [sum(widths[:i]) for i in range(len(group))]
    # Tables are as wide as the longest answer; entries past an answer's own blocks are never read.
    tables = torch.tensor([[min(s + i, sum(widths) - 1) for i in range(max(widths))] for s in starts], device=device)
    sizes = (config.num_layers, 2, sum(widths), _BLOCK, config.num_kv_heads, config.head_dim)
    cache = torch.zeros(sizes, dtype=decoder.dtype, device=device)
    batch = TokenBatch.ragged([range(len(a.tokens)) for a in group], tables, _BLOCK)
    wanted = torch.cat([torch.arange(len(a.tokens)) >= a.first for a in group]).to(device)
    hidden, start = decoder.embed(torch.tensor([t for a in group for t in a.tokens], device=device)), 0
    for end in ends:
        hidden, _ = decoder.run(range(start, end), hidden, batch, cache)
        start = end
        yield hidden[wanted]
