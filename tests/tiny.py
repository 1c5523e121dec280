"""Tiny random models in Hugging Face folders, and a loop that drives scheduler and runner on them by hand.

Weights are scaled so that every layer and the attention matter and that logits are well spread: no near ties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tiny_families
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from eeinfer.core.block_manager import BlockManager
from eeinfer.core.plan import Outcome, Pass, Plan, Prefill
from eeinfer.core.readiness import Readiness
from eeinfer.core.scheduler import Scheduler
from eeinfer.core.sequence import Sequence as Seq
from eeinfer.core.sequence import Status
from eeinfer.core.strategy import leave_rule
from eeinfer.exits.check import Checked, Exit
from eeinfer.exits.heads import ExitSpec, build_head
from eeinfer.exits.learned_kv import LearnedKVSpec
from eeinfer.model.decoder import Decoder
from eeinfer.model.families import ModelConfig, model_config
from eeinfer.model.loader import load_weights
from eeinfer.runner.capture import Capture
from eeinfer.runner.model_runner import ModelRunner
from eeinfer.runner.row_pool import CacheShape

VOCAB, EOS, BOS = 272, 257, 256
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 40,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "tied-mqa": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope-llama3": {"head_dim": 16, "rope_parameters": LLAMA3},
    "head-dim-12": {"head_dim": 12},
    "sharded": {},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 16,
        "use_sliding_window": False,  # as in released configs
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "rope-dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "rope-yarn": {"head_dim": 16, "rope_parameters": YARN},
    "qwen2-window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 6,
        "use_sliding_window": True,
        "max_window_layers": 3,
    },
    **tiny_families.CONFIGS,  # these are whole configs
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def write_model(folder: Path, variant: str) -> Path:
    """The model `variant` in a new folder; always the same weights."""
    folder.mkdir(parents=True)
    config = tiny_families.CONFIGS.get(variant) or BASE | VARIANTS[variant]
    (folder / "config.json").write_text(json.dumps(config))
    make = tiny_families.weights if variant in tiny_families.CONFIGS else _weights
    _write_weights(folder, make(config, np.random.default_rng(7)), shards=3 if variant == "sharded" else 1)
    _write_tokenizer(folder)
    return folder


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    d, f, heads, kv_heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.get("head_dim", d // heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    qkv_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, gain: float, *, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((rows, columns)) * gain / columns**0.5
        if bias:
            tensors[f"{name}.bias"] = rng.standard_normal(rows) * 0.3

    def norm(name: str, size: int = d) -> None:
        tensors[f"{name}.weight"] = rng.uniform(0.6, 1.4, size)

    matrix("model.embed_tokens", config["vocab_size"], d, 3.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            matrix(f"{prefix}.self_attn.{name}_proj", rows, d, 1.5, bias=qkv_bias)
        if config["model_type"] == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        matrix(f"{prefix}.self_attn.o_proj", d, q, 1.0, bias=config["attention_bias"])
        matrix(f"{prefix}.mlp.gate_proj", f, d, 1.5, bias=config["mlp_bias"])
        matrix(f"{prefix}.mlp.up_proj", f, d, 1.5, bias=config["mlp_bias"])
        matrix(f"{prefix}.mlp.down_proj", d, f, 1.0, bias=config["mlp_bias"])
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], d, 3.0)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def _write_weights(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        own = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_tokenizer(folder: Path) -> None:
    """Bytes as tokens 0 … 255, then <s> and </s>."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def load_decoder(folder: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    """The model in `folder`, on the CPU."""
    config = model_config(folder)
    return Decoder(config, load_weights(folder, config, dtype, torch.device("cpu")))


def bare_exits(
    decoder: Decoder, depths: Sequence[int], measure: str, threshold: float, decay: float = 0.0
) -> list[Exit]:
    """Exits with the model's own norm and head, and with random maps for completion by `learned`."""
    head = [
        build_head(
            ExitSpec(n, "shared", completion=learned_kv(decoder.config, n)),
            {name: tensor.to(decoder.dtype) for name, tensor in learned_tensors(decoder.config, n).items()},
            final_norm=decoder.final_norm,
            vocabulary=decoder.vocabulary,
            eps=decoder.config.norm_eps,
        )
        for n in depths
    ]
    return [Exit(h, measure, threshold, decay=decay) for h in head]


def learned_kv(config: ModelConfig, depth: int) -> LearnedKVSpec | None:
    """Sizes of a learned completion of the exit after `depth` layers."""
    layers = config.num_layers - depth - 1
    return LearnedKVSpec(3, layers, config.num_kv_heads, config.head_dim) if layers else None


def learned_tensors(config: ModelConfig, depth: int) -> dict[str, Tensor]:
    """Random tensors for it, float64."""
    rng, spec = np.random.default_rng(depth), learned_kv(config, depth)
    shapes = spec.tensor_shapes(config.hidden_size) if spec else {}
    return {name: torch.from_numpy(rng.normal(size=shape) / 2) for name, shape in shapes.items()}


class Script:
    """Decides confidences by sequence and token, so that a test says who is ready where; the threshold is 0.5.

    Args:
        confidence: of (sequence, index of the generated token to come, layers executed).
    """

    def __init__(self, confidence: Callable[[Seq, int, int], float]) -> None:
        self.confidence = confidence
        self.rows: list[tuple[Seq, int]] = []
        self.logits = torch.empty(0)  # of the last check

    def exits(self, decoder: Decoder, depths: Sequence[int]) -> list[Exit]:
        """Exits of the model's own head that obey this script."""
        return [ScriptedExit(e.head, e.measure, 0.5, self) for e in bare_exits(decoder, depths, "max-prob", 0.5)]


@dataclass(frozen=True, slots=True)
class ScriptedExit(Exit):
    """An exit whose confidence comes from a Script; logits and tokens are its head's."""

    script: Script

    def check(self, hidden: Tensor, before: Tensor) -> Checked:
        """As Exit.check."""
        assert hidden.shape == before.shape
        depth = self.head.layers_executed
        confidences = [self.script.confidence(sequence, index, depth) for sequence, index in self.script.rows]
        self.script.logits = logits = self.head.logits(hidden)
        return Checked(torch.tensor(confidences, dtype=torch.float64), logits, logits.argmax(dim=-1))


def by_schedule(schedules: dict[str, list[int]]) -> Script:
    """Each sequence follows its own list of depths, one a generated token."""
    return Script(lambda sequence, index, depth: 0.75 if schedules[sequence.request_id][index] == depth else 0.25)


@dataclass
class Loop:
    """Scheduler and runner, driven one plan at a time and checked after each.

    Attributes:
        plans: every plan that ran.
        before: called with each plan before it runs.
        after: called with each plan and outcome before the scheduler takes them in.
    """

    decoder: Decoder
    exits: Sequence[Exit] = ()
    script: Script | None = None
    completion: str = "propagate"
    strategy: str = "split"
    sticky: bool = False
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    prefix_cache: bool = True
    readiness: Readiness | None = None
    capture: Capture | None = None
    plans: list[Plan] = field(default_factory=list)
    before: Callable[[Plan], None] = lambda _: None
    after: Callable[[Plan, Outcome], None] = lambda *_: None

    def __post_init__(self) -> None:
        shape = CacheShape(self.num_blocks, self.block_size, self.max_num_seqs)
        self.runner = ModelRunner(
            self.decoder, self.exits, self.completion, shape, readiness=self.readiness, capture=self.capture
        )
        self.scheduler = Scheduler(
            BlockManager(self.num_blocks, self.block_size, prefix_cache=self.prefix_cache),
            tuple(stage.stop for stage in self.runner.stages),
            leave_rule(self.strategy, sticky=self.sticky),
            approximate=self.completion != "oracle",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def run(self, sequences: Sequence[Seq], arrivals: Sequence[int] | None = None) -> None:
        """Run until all are done; sequence i is added before step `arrivals[i]` (all at once by default)."""
        due = sorted(zip(arrivals or [0] * len(sequences), count(), sequences, strict=False))
        for step in count():
            while due and due[0][0] <= step:
                self.scheduler.add(due.pop(0)[2])
            if not due and not self.scheduler.has_work:
                break
            self.step()
        self.check_idle()

    def step(self) -> None:
        """One plan, if there is one."""
        if (plan := self.scheduler.next()) is None:
            return
        self.plans.append(plan)
        if self.script and isinstance(plan, Pass):
            owners = [self.owner(row.slot) for row in plan.rows]
            self.script.rows = [(sequence, len(sequence.depths)) for sequence in owners]
        self.before(plan)
        outcome = self.runner.run(plan)
        self.after(plan, outcome)
        self.scheduler.commit(plan, outcome)
        self.scheduler.check()

    def owner(self, slot: int) -> Seq:
        """The running sequence in a slot."""
        sequence = self.scheduler._by_slot[slot]
        assert sequence is not None
        return sequence

    def kv(self, block_table: Sequence[int], start: int, stop: int) -> Tensor:
        """Cached K and V of positions start … stop - 1, [layers, 2, positions, kv_heads, head_dim]."""
        blocks = self.runner.cache[:, :, list(block_table)]
        return blocks.flatten(2, 3)[:, :, start:stop]

    def running(self) -> list[Seq]:
        """Sequences with a place in the cache."""
        return [s for s in self.scheduler.live if s.status is Status.RUNNING]

    def check_idle(self) -> None:
        """Nothing is left behind."""
        self.scheduler.check()
        assert self.scheduler.blocks.num_free == self.num_blocks, "blocks leaked"
        assert not self.running()


def between_iterations(plan: Plan) -> bool:
    """Whether all KV of the tokens taken so far is in place when `plan` comes up."""
    return isinstance(plan, Prefill) or (isinstance(plan, Pass) and plan.stage == 0)


def sequence(name: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Seq:
    """A sequence that only max_tokens ends, unless `eos_token_ids` is given."""
    return Seq(name, list(prompt), max_tokens, options.pop("eos_token_ids", frozenset()), **options)
