"""The families that are known, by the architecture that a `config.json` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eeinfer.errors import ModelError
from eeinfer.model.families import gemma, gpt2, gpt_neo, llama, olmo2, phi3
from eeinfer.model.families.traits import ModelConfig
from eeinfer.model.folder import CONFIG_FILE, read_json

FAMILIES: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Olmo2ForCausalLM": olmo2.olmo2,
    "Phi3ForCausalLM": phi3.phi3,
    "GPT2LMHeadModel": gpt2.gpt2,
    "GPTNeoForCausalLM": gpt_neo.gpt_neo,
}


def model_config(folder: Path, file: str = CONFIG_FILE) -> ModelConfig:
    """Traits of the model in `folder`, of which `file` is the config.

    Raises:
        ModelError: an unknown architecture, activation or RoPE kind, or a missing or unusable key.
    """
    path = folder / file
    config = read_json(path)
    architectures = config.get("architectures")
    known = [name for name in FAMILIES if isinstance(architectures, list) and name in architectures]
    if not known:
        own = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise ModelError(f"{path}: architecture {architectures} is not supported; known are {', '.join(FAMILIES)}{own}")
    try:
        return FAMILIES[known[0]](config)
    except KeyError as error:
        raise ModelError(f"{path}: the key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
