"""vLLM, of the CPU or the CUDA build: whichever its environment has."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import vllm
from vllm.platforms import current_platform
from worker_protocol import Answer, serve


class VllmEngine:
    """Weights in bf16, prefix cache off, room for all sequences of the largest batch; otherwise vLLM's own choices."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = vllm.LLM(
            options["model"],
            dtype="bfloat16",
            max_num_seqs=options["batch"],
            max_num_batched_tokens=options["prefill_tokens"],
            max_model_len=options["length"],
            enable_prefix_caching=False,
            disable_log_stats=False,  # else requests have no times
        )
        self.version = vllm.__version__
        self.device = current_platform.device_type

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Answer all prompts at once; see `worker_protocol.Engine`."""
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        started = perf_counter()
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        seconds = perf_counter() - started
        times = [output.metrics for output in outputs]
        decode_seconds = max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times)
        return Answer(seconds, decode_seconds, [list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    serve(VllmEngine)
