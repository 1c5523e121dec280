"""Transformers on the same shape: random weights, bfloat16, its own generate."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from gpu.place import Place

from eeinfer.model.families import ModelConfig
from eeinfer.model.weights import weight_bytes


def transformers_rate(place: Place, config: ModelConfig, batch: int, context: int, new: int) -> float | str:
    """Decode tokens a second of transformers' `generate`, or why there is no such figure."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        return f"no transformers: {error}"
    needed, free = weight_bytes(config, torch.bfloat16), place.free()
    if needed * 1.5 > free:
        return f"{needed / 2**30:.1f} GiB of weights and a cache do not fit {free / 2**30:.1f} GiB"
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=context + new,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        eos_token_id=None,
        pad_token_id=0,
    )
    plain = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(place.device):
            model = LlamaForCausalLM(theirs).eval()
    finally:
        torch.set_default_dtype(plain)
    ids = torch.randint(1, config.vocab_size, (batch, context), device=place.device)
    return _decode_rate(place, model, ids, new)


@torch.inference_mode()
def _decode_rate(place: Place, model: Any, ids: torch.Tensor, new: int) -> float:
    """From the time that `new` tokens take longer than one."""

    def seconds(tokens: int) -> float:
        place.synchronise()
        started = perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        place.synchronise()
        return perf_counter() - started

    seconds(2)
    one, all_ = (min(seconds(tokens) for _ in range(2)) for tokens in (1, new))
    return ids.shape[0] * (new - 1) / max(all_ - one, 1e-9)
