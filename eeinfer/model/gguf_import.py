"""GGUF files of Llama models turned into Hugging Face folders, weights dequantised to bfloat16.

GGUF interleaves the rotary halves of Q and K (ggml rotates neighbours, Hugging Face row i with i + head_dim / 2), so
those rows are put back. The tokenizer exists only as metadata: vocabulary, merges and the *name* of a pre-tokenizer,
whose rules live in llama.cpp (`llama-vocab.cpp`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eeinfer.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from gguf import ReaderTensor
    from tokenizers import Tokenizer

Progress = Callable[[str, int, int], None]  # label, done, total
TensorTable = dict[str, tuple[str, tuple[int, ...]]]  # GGUF name -> Hugging Face name, shape
T = TypeVar("T")

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # llama_token_type in llama.h

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name in the metadata -> regular expressions applied one after the other, each splitting the pieces of the one before.
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_SPLIT,),
    "llama-bpe": (LLAMA3_SPLIT,),
    "smollm": (r"\p{N}", GPT2_SPLIT),
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file: metadata by key and tensors by name (memory-mapped)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def damaged(self, what: str) -> ModelError:
        """The error for a file that is not whole."""
        return ModelError(f"{self.path}: {what}; fetch or convert the file again")

    def unsupported(self, what: str) -> ModelError:
        """The error for a whole file of a kind that cannot be imported."""
        return ModelError(f"{self.path}: {what}; use the model's safetensors folder instead")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata value of `key`, or `default`. Raises ModelError when it is missing or not of type `kind`."""
        value = self.metadata.get(key, default)
        if value is None:
            raise self.damaged(f"metadata key {key} is missing")
        if not isinstance(value, kind):
            raise self.unsupported(f"metadata key {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def special_tokens(self) -> dict[str, int]:
        """Ids of bos, eos, pad and unk, as far as the file names them."""
        keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {name: self.get(f"tokenizer.ggml.{key}_token_id", int, -1) for name, key in keys.items()}
        if max(ids.values()) >= len(self.get("tokenizer.ggml.tokens", list)):
            raise self.damaged(f"a special token is outside the vocabulary: {ids}")
        return {name: token_id for name, token_id in ids.items() if token_id >= 0}


def import_gguf(source: Path, target: Path, *, progress: Progress) -> None:
    """Writes the Llama model in the GGUF file `source` as a Hugging Face folder `target` (made if it is not there).

    One tensor at a time is held in memory. `progress` gets the label "dequantising", tensors done and their number.
    Raises ModelError for unreadable or truncated files and for architectures, tensors and tokenizers not known here.
    """
    gguf = open_gguf(source)
    config = llama_config(gguf)
    tokenizer = build_tokenizer(gguf)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    generation = {name: token_id for name, token_id in config.items() if name.endswith("_token_id")}
    jsons = {"config": config, "tokenizer_config": tokenizer_config(gguf), "generation_config": generation}
    for name, content in jsons.items():
        encoded = json.dumps(content, indent=2, ensure_ascii=False)
        (target / f"{name}.json").write_text(encoded + "\n", encoding="utf-8")
    write_weights(gguf, config, target / "model.safetensors", progress)


def open_gguf(path: Path) -> GgufFile:
    """Reads metadata and tensor table. Raises ModelError when the file is missing, truncated or not GGUF."""
    import numpy as np
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise ModelError(f"{path}: not a whole GGUF file of a known version ({error}); fetch it again") from error
    # the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06
    metadata |= {key: float(str(np.float32(value))) for key, value in metadata.items() if isinstance(value, float)}
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def llama_config(gguf: GgufFile) -> dict[str, Any]:
    """The config.json of a Llama model. Raises ModelError for other architectures and unsupported variants."""
    if (architecture := gguf.get("general.architecture", str)) != "llama":
        raise gguf.unsupported(f"architecture {architecture!r}, but only 'llama' can be imported")
    heads = gguf.get("llama.attention.head_count", int)
    hidden_size = gguf.get("llama.embedding_length", int)
    head_dim = gguf.get("llama.attention.key_length", int, hidden_size // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if gguf.get(key, int, head_dim) != head_dim:
            raise gguf.unsupported(f"{key} is not the head size {head_dim}")
    ids = gguf.special_tokens()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens", list)),
        "hidden_size": hidden_size,
        "intermediate_size": gguf.get("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": gguf.get("llama.attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": gguf.get("llama.context_length", int),
        "rope_theta": gguf.get("llama.rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(gguf),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        **{f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if name in ids},
    }


def _rope_scaling(gguf: GgufFile) -> dict[str, Any] | None:
    if "rope_freqs.weight" in gguf.tensors:  # Llama 3.1 and later: the settings themselves are not in the file
        raise gguf.unsupported("Llama 3.1 RoPE scaling (tensor rope_freqs) cannot be imported")
    kind = gguf.get("llama.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise gguf.unsupported(f"RoPE scaling {kind!r} cannot be imported (known: linear, yarn)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": gguf.get("llama.rope.scaling.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.get("llama.rope.scaling.original_context_length", int)
    return scaling


def tensor_table(config: dict[str, Any]) -> TensorTable:
    """Every weight that a model of this config has: its GGUF name, Hugging Face name and shape."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (q_rows, hidden)),
        "attn_k": ("self_attn.k_proj", (kv_rows, hidden)),
        "attn_v": ("self_attn.v_proj", (kv_rows, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, q_rows)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    table: TensorTable = {"token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden))}
    for i in range(config["num_hidden_layers"]):
        table |= {f"blk.{i}.{g}.weight": (f"model.layers.{i}.{h}.weight", shape) for g, (h, shape) in layer.items()}
    table["output_norm.weight"] = ("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (vocab, hidden))
    return table


def write_weights(gguf: GgufFile, config: dict[str, Any], path: Path, progress: Progress) -> None:
    """Dequantises one tensor after the other into a safetensors file; the library's writer would want all at once.

    The format: an 8-byte little-endian header length, a JSON header and the tensors' bytes in order.
    """
    import torch

    table = tensor_table(config)
    _check_tensors(gguf, table)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in table.values():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for done, name in enumerate(table):
            progress("dequantising", done, len(table))
            weights = torch.tensor(_dequantised(gguf, name, config)).to(torch.bfloat16)
            file.write(weights.view(torch.int16).numpy().data)  # numpy has no bfloat16
    progress("dequantising", len(table), len(table))


def _check_tensors(gguf: GgufFile, table: TensorTable) -> None:
    for name, (_, shape) in table.items():
        if name not in gguf.tensors:
            raise gguf.damaged(f"tensor {name} is missing")
        found = tuple(reversed(gguf.tensors[name].shape.tolist()))  # ggml lists the innermost dimension first
        if found != shape:
            raise gguf.unsupported(f"tensor {name} has shape {found}, the metadata asks for {shape}")
    if unexpected := sorted(gguf.tensors.keys() - table.keys()):
        raise gguf.unsupported(f"tensor {unexpected[0]} belongs to no plain Llama model")


def _dequantised(gguf: GgufFile, name: str, config: dict[str, Any]) -> np.ndarray:
    """float32 weights of one tensor in the Hugging Face row order."""
    from gguf import dequantize

    tensor = gguf.tensors[name]
    try:
        weights = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise gguf.unsupported(f"{name} is of unsupported type {tensor.tensor_type.name}") from None
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name.split(".")[-2])
    return weights if heads is None else unpermute(weights, heads)


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, in] of Q or K (then its KV heads) from interleaved rotary pairs to two halves.

    Within a head, row 2i goes to i and row 2i + 1 to head_dim / 2 + i, which undoes `permute` of llama.cpp's converter.
    """
    rows, width = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """Byte-level BPE from the metadata; control tokens are special, user-defined ones matched whole but kept in text.

    As in llama.cpp, bytes without a token of their own (some vocabularies leave out control characters) are dropped.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    if (name := gguf.get("tokenizer.ggml.model", str)) != "gpt2":
        raise gguf.unsupported(f"tokenizer {name!r}, but only byte-level BPE ('gpt2') can be imported")
    kinds = gguf.get("tokenizer.ggml.token_type", list)
    whole_words = gguf.get("tokenizer.ggml.pre", str) == "llama-bpe"
    try:
        tokens = list(zip(gguf.get("tokenizer.ggml.tokens", list), kinds, strict=True))
        vocabulary = {token: i for i, (token, kind) in enumerate(tokens) if kind != UNUSED}
        merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges", list)]
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    except Exception as error:  # the library raises nothing narrower
        raise gguf.damaged(f"vocabulary, token types and merges do not fit ({error})") from error
    marked = [(token, kind == CONTROL) for token, kind in tokens if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in marked])
    _set_rules(tokenizer, gguf)
    return tokenizer


def _set_rules(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """How text is cut before the merges, how tokens are joined again, and whether BOS is put in front."""
    from tokenizers import Regex, decoders, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    if (kind := gguf.get("tokenizer.ggml.pre", str)) not in PRE_TOKENIZERS:
        raise gguf.unsupported(f"tokenizer.ggml.pre is {kind!r}, known are {', '.join(PRE_TOKENIZERS)}")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if _adds_bos(gguf):
        bos_id = gguf.get("tokenizer.ggml.bos_token_id", int)
        bos = gguf.get("tokenizer.ggml.tokens", list)[bos_id]
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])


def _adds_bos(gguf: GgufFile) -> bool:
    """llama.cpp's rule: what the file says; when it does not say, only Llama 3 vocabularies."""
    return gguf.get("tokenizer.ggml.add_bos_token", bool, gguf.get("tokenizer.ggml.pre", str) == "llama-bpe")


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: chat template, special tokens as strings, whether encoding adds BOS."""
    tokens = gguf.get("tokenizer.ggml.tokens", list)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.get("llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(gguf),
        **{f"{name}_token": tokens[token_id] for name, token_id in gguf.special_tokens().items()},
        "chat_template": gguf.metadata.get("tokenizer.chat_template"),
    }
