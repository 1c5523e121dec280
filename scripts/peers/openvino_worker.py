"""OpenVINO GenAI: its pipeline with continuous batching, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker_protocol import Answer, serve

BLOCK_SIZE = 32  # tokens of a KV block on a CPU


class OpenvinoEngine:
    """The exported model with weights, arithmetic and KV cache in bf16 (its own choice for the cache is 8 bits)."""

    device = "cpu"

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = (-(-options["length"] // BLOCK_SIZE) + 1) * options["batch"]
        scheduler.max_num_seqs = options["batch"]
        scheduler.max_num_batched_tokens = options["prefill_tokens"]
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": options["threads"],
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options["exported"], scheduler, "CPU", properties)
        self.version = openvino_genai.__version__

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Answer all prompts at once; see `worker_protocol.Engine`."""
        config = openvino_genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
        started = perf_counter()
        tensors = [openvino.Tensor(np.array([prompt])) for prompt in prompts]
        results = self._pipeline.generate(tensors, [config] * len(prompts))
        seconds = perf_counter() - started
        first_tokens = max(result.perf_metrics.get_ttft().mean for result in results) / 1000  # of milliseconds
        return Answer(seconds, seconds - first_tokens, [list(result.m_generation_ids[0]) for result in results])


if __name__ == "__main__":
    serve(OpenvinoEngine)
