"""Plain references of the families that differ from Llama in more than a tensor; see `reference.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from reference import PlainLlama, Vector


def gelu(x: Vector) -> Vector:
    """The approximation by tanh (arXiv 1606.08415)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class PlainMistral(PlainLlama):
    """A window in all layers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.windows = [self.config["sliding_window"]] * self.num_layers


class PlainGemma(PlainLlama):
    """Gemma 2: gains beside 1, norms before and behind, bounds, and every second layer with a window."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.windows = [None if i % 2 else self.config["sliding_window"] for i in range(self.num_layers)]
        self.scale = 1 / math.sqrt(self.config["query_pre_attn_scalar"])

    def logits(self, hidden: Vector) -> Vector:
        """Bounded, in Gemma 2."""
        return _within(super().logits(hidden), self.config.get("final_logit_softcapping"))

    def _embed(self, token: int, position: int) -> Vector:
        scale = float(np.float64(self.config["hidden_size"]) ** 0.5)
        return super()._embed(token, position) * scale

    def _norm(self, name: str, x: Vector) -> Vector:
        return x / np.sqrt((x * x).mean() + self.eps) * (1 + self.weights[f"{name}.weight"])

    def _bounded(self, scores: Vector) -> Vector:
        return _within(scores, self.config.get("attn_logit_softcapping"))

    def _add_attention(self, name: str, hidden: Vector, attended: Vector) -> Vector:
        return hidden + self._norm(f"{name}.post_attention_layernorm", attended)

    def _mlp(self, name: str, hidden: Vector) -> Vector:
        out = self._gated(name, self._norm(f"{name}.pre_feedforward_layernorm", hidden))
        return hidden + self._norm(f"{name}.post_feedforward_layernorm", out)

    def _activation(self, x: Vector) -> Vector:
        return gelu(x)


class PlainGemma3(PlainGemma):
    """Gemma 3: the last of every few layers sees everything, and turns otherwise than the others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        whole, local = self.rope[0], {"rope_theta": self.config["rope_local_base_freq"]}
        every = self.config["sliding_window_pattern"]
        sees_all = [i % every == every - 1 for i in range(self.num_layers)]
        self.windows = [None if all_ else self.config["sliding_window"] for all_ in sees_all]
        self.rope = [whole if all_ else local for all_ in sees_all]


def _within(x: Vector, bound: float | None) -> Vector:
    return x if bound is None else bound * np.tanh(x / bound)


class PlainOlmo2(PlainLlama):
    """OLMo 2: norms behind attention and MLP only; q and k are normalised as wholes."""

    def _read_by_attention(self, layer: int, hidden: Vector) -> Vector:
        assert layer >= 0
        return hidden

    def _heads(self, name: str, normed: Vector) -> Vector:
        projected = self._linear(f"{name}_proj", normed)
        if f"{name}_norm.weight" in self.weights:
            projected = self._norm(f"{name}_norm", projected)
        return projected.reshape(-1, self.head_dim)

    def _add_attention(self, name: str, hidden: Vector, attended: Vector) -> Vector:
        return hidden + self._norm(f"{name}.post_attention_layernorm", attended)

    def _mlp(self, name: str, hidden: Vector) -> Vector:
        return hidden + self._norm(f"{name}.post_feedforward_layernorm", self._gated(name, hidden))


class PlainPhi3(PlainLlama):
    """Phi-3: Llama once the fused matrices are cut, and in some releases half of each head turns."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.num_layers):
            name = f"model.layers.{i}"
            fused = np.split(self.weights[f"{name}.self_attn.qkv_proj.weight"], [q, q + kv])
            for part, rows in zip("qkv", fused, strict=True):
                self.weights[f"{name}.self_attn.{part}_proj.weight"] = rows
            gate, up = np.split(self.weights[f"{name}.mlp.gate_up_proj.weight"], 2)
            self.weights |= {f"{name}.mlp.gate_proj.weight": gate, f"{name}.mlp.up_proj.weight": up}
        if window := self.config.get("sliding_window"):
            self.windows = [window] * self.num_layers
        if "rope_scaling" in self.config:
            original, longest = (
                self.config[key] for key in ("original_max_position_embeddings", "max_position_embeddings")
            )
            extra: dict[str, Any] = {"partial_rotary_factor": self.config["partial_rotary_factor"]}
            extra |= {"factor": longest / original, "original_max_position_embeddings": original}
            self.rope = [rope | extra for rope in self.rope]


class PlainGpt2(PlainLlama):
    """GPT-2: learned positions, layer norms, biases, no gate; its tensors under Llama's names."""

    heads_key, layers_key = "n_head", "n_layer"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for i in range(self.num_layers):
            self._rename(f"transformer.h.{i}", f"model.layers.{i}")
        self.weights["model.embed_tokens.weight"] = self.weights["transformer.wte.weight"]

    def _settings(self, config: dict[str, Any]) -> dict[str, Any]:
        sizes = {"num_hidden_layers": config[self.layers_key], "num_attention_heads": config[self.heads_key]}
        sizes |= {"num_key_value_heads": config[self.heads_key], "rms_norm_eps": config["layer_norm_epsilon"]}
        return config | sizes | {"hidden_size": len(self.weights["transformer.ln_f.weight"]), "rope_theta": 1.0}

    def _rename(self, old: str, new: str) -> None:
        weight, bias = (self.weights[f"{old}.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
        for part, rows, shift in zip("qkv", np.split(weight.T, 3), np.split(bias, 3), strict=True):
            self.weights |= {f"{new}.self_attn.{part}_proj.weight": rows, f"{new}.self_attn.{part}_proj.bias": shift}
        for theirs, ours in (("attn.c_proj", "self_attn.o_proj"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
            self.weights[f"{new}.{ours}.weight"] = self.weights[f"{old}.{theirs}.weight"].T
            self.weights[f"{new}.{ours}.bias"] = self.weights[f"{old}.{theirs}.bias"]

    def logits(self, hidden: Vector) -> Vector:
        """The embedding serves as the head."""
        return self.weights["transformer.wte.weight"] @ self._layer_norm("transformer.ln_f", hidden)

    def _embed(self, token: int, position: int) -> Vector:
        return super()._embed(token, position) + self.weights["transformer.wpe.weight"][position]

    def _layer_norm(self, name: str, x: Vector) -> Vector:
        centred = x - x.mean()
        scaled = centred / np.sqrt((centred**2).mean() + self.eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _read_by_attention(self, layer: int, hidden: Vector) -> Vector:
        return self._layer_norm(f"transformer.h.{layer}.ln_1", hidden)

    def _mlp(self, name: str, hidden: Vector) -> Vector:
        normed = self._layer_norm(f"{name.replace('model.layers', 'transformer.h')}.ln_2", hidden)
        return hidden + self._linear(f"{name}.mlp.down", gelu(self._linear(f"{name}.mlp.up", normed)))

    def _rotate(self, x: Vector, position: int, layer: int) -> Vector:
        assert min(position, layer) >= 0
        return x


class PlainGptNeo(PlainGpt2):
    """GPT-Neo: separate projections without biases, scores as they are, and windows in every second layer."""

    heads_key, layers_key = "num_heads", "num_layers"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.scale = 1.0
        self.windows = [self.config["window_size"] if i % 2 else None for i in range(self.num_layers)]

    def _rename(self, old: str, new: str) -> None:
        for part in "qkv":
            self.weights[f"{new}.self_attn.{part}_proj.weight"] = self.weights[
                f"{old}.attn.attention.{part}_proj.weight"
            ]
        for theirs, ours in (
            ("attn.attention.out_proj", "self_attn.o_proj"),
            ("mlp.c_fc", "mlp.up"),
            ("mlp.c_proj", "mlp.down"),
        ):
            for kind in ("weight", "bias"):
                self.weights[f"{new}.{ours}.{kind}"] = self.weights[f"{old}.{theirs}.{kind}"]


REFERENCES = {
    "mistral": PlainMistral,
    "gemma2": PlainGemma,
    "gemma3_text": PlainGemma3,
    "olmo2": PlainOlmo2,
    "phi3": PlainPhi3,
    "gpt2": PlainGpt2,
    "gpt_neo": PlainGptNeo,
}


def plain_model(folder: Path) -> PlainLlama:
    """The reference of the model in `folder`."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return REFERENCES.get(kind, PlainLlama)(folder)
