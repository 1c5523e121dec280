"""Does greedy `full` give what `transformers` gives, token for token, in float32?

eeinfer answers all prompts batched and with few KV blocks, so that sequences are preempted and replayed; transformers
answers them one by one, with its own tokenizer and chat template. Where two answers part, the gap between both tokens
in transformers' logits is printed: below 1e-4 it is a tie, which rounding decides.

    python scripts/check_against_transformers.py --prompts FILE --num-prompts 50 --batch 16 --num-blocks 160
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eeinfer import LLM, Request, SamplingParams
from eeinfer.engine.prompt_file import PACKAGED_PROMPTS, LineError, read_prompt_file
from eeinfer.model.store import DEFAULT_MODEL, resolve

TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers part. `gap`: transformers' logit of its own token minus that of eeinfer's."""

    index: int
    gap: float

    @property
    def tie(self) -> bool:
        """Whether rounding decides between the two tokens."""
        return self.gap < TIE


class Reference:
    """Greedy answers of transformers, one prompt at a time, in float32."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, request: Request) -> list[int]:
        """Prompt token ids."""
        if request.messages is None:
            return list(self._tokenizer(request.prompt)["input_ids"])
        encoded = self._tokenizer.apply_chat_template(
            list(request.messages), add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    @torch.inference_mode()
    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Generated token ids."""
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        output = self._model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def compare(self, prompt: list[int], expected: list[int], answer: list[int]) -> Difference | None:
        """Where `answer` leaves `expected`, if it does."""
        if answer == expected:
            return None
        shared = [a == b for a, b in zip(expected, answer, strict=False)]
        index = shared.index(False) if False in shared else len(shared)
        if index == len(shared):  # one answer ends where the other goes on
            return Difference(index, torch.inf)
        logits = self._model(torch.tensor([prompt + expected[:index]])).logits[0, -1]
        return Difference(index, (logits[expected[index]] - logits[answer[index]]).item())


def main() -> int:
    """Exit code: 0 when all answers are equal, else 1."""
    options = parse_arguments()
    requests = read_requests(options.prompts, options.num_prompts, options.max_tokens)
    answers, summary = answer_with_eeinfer(requests, options)
    reference = Reference(resolve(options.model))
    differences = []
    for request, answer in zip(requests, answers, strict=True):
        prompt = reference.encode(request)
        expected = reference.answer(prompt, options.max_tokens)
        difference = reference.compare(prompt, expected, answer)
        print(f"{request.id:<24} {len(prompt):>5} + {len(expected):<4} tokens  {describe(difference)}", flush=True)
        differences += [difference] if difference else []
    ties = sum(difference.tie for difference in differences)
    print(
        f"{len(requests) - len(differences)} of {len(requests)} answers equal, {len(differences)} differ ({ties} ties)"
    )
    print(summary)
    return 1 if differences else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name in the store or local folder")
    parser.add_argument("--prompts", type=Path, default=PACKAGED_PROMPTS, help="JSON Lines; default: the packaged ones")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="most sequences in flight")
    parser.add_argument("--num-blocks", type=int, default=120, help="KV blocks of 16 tokens")
    return parser.parse_args()


def read_requests(path: Path, count: int, max_tokens: int) -> list[Request]:
    """The first prompts of a file, all greedy and with the same limit."""
    entries = read_prompt_file(path, limit=count)
    if errors := [entry.message for entry in entries if isinstance(entry, LineError)]:
        sys.exit(f"{path}: {errors[0]}")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [replace(entry, sampling=sampling) for entry in entries if isinstance(entry, Request)]


def answer_with_eeinfer(requests: Sequence[Request], options: argparse.Namespace) -> tuple[list[list[int]], str]:
    """Generated token ids of each request, and a line about the run."""
    llm = LLM(
        options.model,
        strategy="full",
        dtype="float32",
        device="cpu",
        max_num_seqs=options.batch,
        num_blocks=options.num_blocks,
    )
    started = perf_counter()
    outputs = llm.generate(requests)
    seconds = perf_counter() - started
    if errors := [f"{output.id}: {output.error}" for output in outputs if output.error]:
        sys.exit(errors[0])
    summary = (
        f"eeinfer: {llm.stats.generated_tokens} tokens in {seconds:.1f} s, batch {options.batch}, "
        f"{options.num_blocks} blocks, {llm.stats.preemptions} preemptions"
    )
    return [[token.token_id for token in output.tokens] for output in outputs], summary


def describe(difference: Difference | None) -> str:
    """One prompt's verdict."""
    if difference is None:
        return "equal"
    return f"differs at token {difference.index}, logit gap {difference.gap:.2e}{' (a tie)' if difference.tie else ''}"


if __name__ == "__main__":
    sys.exit(main())
