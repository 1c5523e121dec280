"""Decoders written from their definition: float64, one token at a time, one layer at a time, K and V in plain lists.

Nothing of eeinfer is used here. The engine's batching, paging, stages, completion and replay are held against this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

Vector = NDArray[np.float64]


@dataclass
class Trace:
    """What becomes of one sequence.

    Attributes:
        tokens: generated token ids.
        gaps: for each, the largest logit minus the second: how far it is from a tie.
        keys, values: by layer, then position: [kv_heads, head_dim], keys rotated.
    """

    keys: list[list[Vector]]
    values: list[list[Vector]]
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def kv(self) -> NDArray[np.float64]:
        """[layers, 2, positions, kv_heads, head_dim]."""
        return np.stack([np.stack((k, v)) for k, v in zip(self.keys, self.values, strict=True)])


class PlainLlama:
    """The model in `folder`, a Hugging Face folder. `learned`: tensors for completion by `learned`, by depth."""

    def __init__(self, folder: Path) -> None:
        self.learned: dict[int, dict[str, Vector]] = {}
        config = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Vector] = {}
        for path in folder.glob("*.safetensors"):
            self.weights |= {name: array.astype(np.float64) for name, array in load_file(path).items()}
        self.config = config = self._settings(config)
        self.num_layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps: float = config["rms_norm_eps"]
        self.head_name = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]} | (
            config.get("rope_scaling") or {}
        )
        self.rope = [rope] * self.num_layers
        self.scale = 1 / math.sqrt(self.head_dim)
        self.windows: list[int | None] = [None] * self.num_layers
        if config.get("use_sliding_window"):
            first = config["max_window_layers"]
            self.windows = [config["sliding_window"] if i >= first else None for i in range(self.num_layers)]

    def _settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config with the keys of Llama's; other families spell some otherwise."""
        return config

    def generate(self, prompt: Sequence[int], depths: Sequence[int], completion: str) -> Trace:
        """Generate len(depths) tokens greedily; token j leaves after depths[j] layers, the first at full depth."""
        assert depths[0] == self.num_layers, "a prompt runs at full depth"
        trace = Trace([[] for _ in range(self.num_layers)], [[] for _ in range(self.num_layers)])
        for position, token in enumerate(prompt):
            hidden = self._run(token, position, self.num_layers, trace)
        self._pick(hidden, trace)
        for position, depth in enumerate(depths[1:], start=len(prompt)):
            hidden = self._run(trace.tokens[-1], position, depth, trace)
            self._pick(hidden, trace)
            self._complete(completion, depth, hidden, position, trace)
        return trace

    def teacher_forced(self, tokens: Sequence[int]) -> Trace:
        """K and V of `tokens` when all run at full depth."""
        trace = Trace([[] for _ in range(self.num_layers)], [[] for _ in range(self.num_layers)])
        for position, token in enumerate(tokens):
            self._run(token, position, self.num_layers, trace)
        return trace

    def logits(self, hidden: Vector) -> Vector:
        """The model's own norm and head."""
        return self.weights[f"{self.head_name}.weight"] @ self._norm("model.norm", hidden)

    def _run(self, token: int, position: int, depth: int, trace: Trace) -> Vector:
        hidden = self._embed(token, position)
        for layer in range(depth):
            hidden = self._layer(layer, hidden, position, trace)
        return hidden

    def _embed(self, token: int, position: int) -> Vector:
        """`position` is for models that add something for it."""
        assert position >= 0
        return self.weights["model.embed_tokens.weight"][token]

    def _layer(self, layer: int, hidden: Vector, position: int, trace: Trace) -> Vector:
        name = f"model.layers.{layer}"
        normed = self._read_by_attention(layer, hidden)
        key, value = self._key_value(layer, normed, position)
        trace.keys[layer].append(key)
        trace.values[layer].append(value)
        query = self._heads(f"{name}.self_attn.q", normed)
        window = self.windows[layer] or len(trace.keys[layer])
        keys, values = trace.keys[layer][-window:], trace.values[layer][-window:]
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            rotated = self._rotate(query[head], position, layer)
            scores = self._bounded(np.array([rotated @ k[group] for k in keys]) * self.scale)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            outputs.append(sum(w * v[group] for w, v in zip(weights, values, strict=True)))
        attended = self._linear(f"{name}.self_attn.o_proj", np.concatenate(outputs))
        return self._mlp(name, self._add_attention(name, hidden, attended))

    def _read_by_attention(self, layer: int, hidden: Vector) -> Vector:
        return self._norm(f"model.layers.{layer}.input_layernorm", hidden)

    def _bounded(self, scores: Vector) -> Vector:
        return scores

    def _add_attention(self, name: str, hidden: Vector, attended: Vector) -> Vector:
        assert name
        return hidden + attended

    def _mlp(self, name: str, hidden: Vector) -> Vector:
        return hidden + self._gated(name, self._norm(f"{name}.post_attention_layernorm", hidden))

    def _gated(self, name: str, normed: Vector) -> Vector:
        gate = self._linear(f"{name}.mlp.gate_proj", normed)
        up = self._linear(f"{name}.mlp.up_proj", normed)
        return self._linear(f"{name}.mlp.down_proj", self._activation(gate) * up)

    def _activation(self, x: Vector) -> Vector:
        return x / (1 + np.exp(-x))

    def _complete(self, completion: str, depth: int, hidden: Vector, position: int, trace: Trace) -> None:
        """K and V of the layers from `depth` on, for a token that left with `hidden`."""
        for layer in range(depth, self.num_layers):
            if completion == "oracle":
                hidden = self._layer(layer, hidden, position, trace)
            elif completion == "copy":
                trace.keys[layer].append(trace.keys[depth - 1][-1])
                trace.values[layer].append(trace.values[depth - 1][-1])
            else:
                normed = self._read_by_attention(layer, hidden)
                if completion == "learned" and layer > depth:
                    key, value = self._learned(layer, normed, position, depth, hidden)
                else:
                    key, value = self._key_value(layer, normed, position)
                trace.keys[layer].append(key)
                trace.values[layer].append(value)

    def _key_value(self, layer: int, normed: Vector, position: int) -> tuple[Vector, Vector]:
        key = self._heads(f"model.layers.{layer}.self_attn.k", normed)
        value = self._heads(f"model.layers.{layer}.self_attn.v", normed)
        return np.stack([self._rotate(head, position, layer) for head in key]), value

    def _learned(self, layer: int, normed: Vector, position: int, depth: int, hidden: Vector) -> tuple[Vector, Vector]:
        """K and V of one layer as completion by `learned` makes them, one head at a time."""
        own, skipped = self.learned[depth], layer - depth - 1
        low = own["completion.down.weight"] @ (hidden / np.sqrt((hidden * hidden).mean() + self.eps))
        made = []
        for part, name in enumerate(("k", "v")):
            heads = self._heads(f"model.layers.{layer}.self_attn.{name}", normed)
            for head, old in enumerate(heads.copy()):
                block = (part * (self.num_layers - depth - 1) + skipped) * self.kv_heads + head
                rows = slice(block * self.head_dim, (block + 1) * self.head_dim)
                shift = own["completion.up.weight"][rows] @ low + own["completion.up.bias"][rows]
                heads[head] = own["completion.scale"][part, skipped, head] * old + shift
            made.append(heads)
        key, value = made
        return np.stack([self._rotate(head, position, layer) for head in key]), value

    def _heads(self, name: str, normed: Vector) -> Vector:
        """The heads of q, k or v, [heads, head_dim], before rotation. Qwen3 normalises each head of q and of k."""
        heads = self._linear(f"{name}_proj", normed).reshape(-1, self.head_dim)
        if f"{name}_norm.weight" in self.weights:
            heads = np.stack([self._norm(f"{name}_norm", head) for head in heads])
        return heads

    def _pick(self, hidden: Vector, trace: Trace) -> None:
        logits = self.logits(hidden)
        second, first = np.sort(logits)[-2:]
        trace.tokens.append(int(logits.argmax()))
        trace.gaps.append(float(first - second))

    def _norm(self, name: str, x: Vector) -> Vector:
        return x / np.sqrt((x * x).mean() + self.eps) * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Vector) -> Vector:
        product = self.weights[f"{name}.weight"] @ x
        return product + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else product

    def _rotate(self, x: Vector, position: int, layer: int) -> Vector:
        speeds, factor = frequencies(self.head_dim, self.rope[layer]), rope_factor(self.rope[layer])
        half = len(speeds)
        rotated = x.copy()  # what is left of a head that turns in part stays
        for i in range(half):
            angle = position * float(speeds[i])
            rotated[i] = factor * (x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
            rotated[i + half] = factor * (x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
        return rotated


def frequencies(head_dim: int, rope: dict[str, Any]) -> torch.Tensor:
    """Rotary frequencies in float32: the precision checkpoints were trained with is part of the definition."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind in {"default", "dynamic"}:  # dynamic scaling begins beyond the longest context
        return plain
    if kind == "linear":
        return plain / rope["factor"]
    if kind == "yarn":
        return _yarn(plain, rope)
    if kind == "longrope":
        return plain / torch.tensor(rope["short_factor"])
    assert kind == "llama3"
    return torch.stack([_llama3(frequency, rope) for frequency in plain])


def rope_factor(rope: dict[str, Any]) -> float:
    """Of the kinds that sharpen attention in longer contexts."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "yarn":
        return 0.1 * math.log(rope["factor"]) + 1
    if kind == "longrope":
        return math.sqrt(1 + math.log(rope["factor"]) / math.log(rope["original_max_position_embeddings"]))
    return 1.0


def _yarn(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Kept where a frequency turns beta_fast times or more in the original context, divided where it hardly turns."""

    def dimension(turns: float) -> float:
        wanted = turns * 2 * math.pi / rope["original_max_position_embeddings"]
        return -math.log(wanted) / math.log(rope["rope_theta"]) * len(plain)

    low = max(math.floor(dimension(rope["beta_fast"])), 0)
    high = min(math.ceil(dimension(1)), 2 * len(plain) - 1)
    shares = [min(max((i - low) / (high - low), 0), 1) for i in range(len(plain))]
    return torch.stack([f * (1 - s) + f / rope["factor"] * s for f, s in zip(plain, shares, strict=True)])


def _llama3(frequency: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def random_depths(rng: np.random.Generator, exits: Sequence[int], num_layers: int, count: int) -> list[int]:
    """A schedule of `count` depths: the first full, the others drawn from the exits and full depth."""
    return [num_layers, *rng.choice([*exits, num_layers], size=count - 1).tolist()]
