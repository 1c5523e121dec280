"""transformers: `generate` on the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer
from worker_protocol import Answer, serve


class FirstToken(BaseStreamer):
    """Notes when the first new tokens came. `generate` puts the prompts first, then the tokens of each step."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen = 0.0

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 - the interface of streamers
        """Called by `generate`, which has brought the tokens to the host."""
        self.calls += 1
        if self.calls == 2:  # noqa: PLR2004 - see above
            self.seen = perf_counter()

    def end(self) -> None:
        """Called by `generate` at its end."""


class TransformersEngine:
    """Weights in bf16 and transformers' own choice of attention."""

    def __init__(self, options: dict[str, Any]) -> None:
        chosen = options["device"]
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if chosen == "auto" else chosen
        model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
        self._model = model.to(self.device).eval()
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # without EOS
        self.version = transformers.__version__

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Answer all prompts at once; see `worker_protocol.Engine`. They are of one length, so none is padded."""
        first, started = FirstToken(), perf_counter()
        ids = torch.tensor(prompts, device=self.device)
        mask = torch.ones_like(ids)
        output = self._model.generate(ids, attention_mask=mask, max_new_tokens=output_len, streamer=first)
        token_ids = output[:, ids.shape[1] :].tolist()
        ended = perf_counter()
        return Answer(ended - started, ended - first.seen, token_ids)


if __name__ == "__main__":
    serve(TransformersEngine)
