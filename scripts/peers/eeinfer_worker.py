"""eeinfer with one batching strategy, through its public interface."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from time import perf_counter
from typing import Any

from worker_protocol import Answer, serve

from eeinfer import LLM, Request, SamplingParams

BLOCK_SIZE = 16


class EeinferEngine:
    """Weights in bf16, prefix cache off, KV blocks for all sequences of the largest batch."""

    def __init__(self, options: dict[str, Any]) -> None:
        blocks = (-(-options["length"] // BLOCK_SIZE) + 1) * options["batch"]  # one spare each, as admission wants
        self._llm = LLM(
            options["model"],
            strategy=options["strategy"],
            dtype="bfloat16",
            device=options["device"],
            max_num_seqs=options["batch"],
            max_num_batched_tokens=options["prefill_tokens"],
            block_size=BLOCK_SIZE,
            num_blocks=blocks,
            prefix_cache=False,
        )
        self.version = version("eeinfer")
        self.device = str(self._llm.engine.runner.decoder.device)

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Answer all prompts at once; see `worker_protocol.Engine`."""
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        requests = [
            Request(id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling) for i, prompt in enumerate(prompts)
        ]
        prefilled, started = self._llm.stats.prefill_seconds, perf_counter()
        outputs = self._llm.generate(requests)
        seconds = perf_counter() - started
        if errors := [output.error for output in outputs if output.error]:
            raise RuntimeError(errors[0])
        decode_seconds = seconds - (self._llm.stats.prefill_seconds - prefilled)
        return Answer(seconds, decode_seconds, [[token.token_id for token in output.tokens] for output in outputs])


if __name__ == "__main__":
    serve(EeinferEngine)
