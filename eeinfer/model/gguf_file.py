"""GGUF files: metadata by key and tensors by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eeinfer.errors import ModelError

if TYPE_CHECKING:
    from gguf import ReaderTensor

T = TypeVar("T")

# Ends of a turn, where the end of a text is another token; llama.cpp looks for them, too (`llama-vocab.cpp`).
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file: metadata by key and tensors by name (memory-mapped)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        """What kind of model it is, in llama.cpp's words; keys about the model begin with it."""
        return self.get("general.architecture", str)

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

    def own(self, key: str, kind: type[T], default: T | None = None) -> T:
        """As `get`, of a key that begins with the architecture."""
        return self.get(f"{self.architecture}.{key}", kind, default)

    def special_tokens(self) -> dict[str, int]:
        """Ids of bos, eos, pad and unk, as far as the file names them."""
        keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {name: self.get(f"tokenizer.ggml.{key}_token_id", int, -1) for name, key in keys.items()}
        if max(ids.values()) >= len(self.get("tokenizer.ggml.tokens", list)):
            raise self.damaged(f"a special token is outside the vocabulary: {ids}")
        return {name: token_id for name, token_id in ids.items() if token_id >= 0}

    def generation_config(self) -> dict[str, Any]:
        """Ids of bos, eos and pad for generation_config.json; eos is a list where a turn ends otherwise than a text."""
        found: dict[str, Any] = {f"{name}_token_id": i for name, i in self.special_tokens().items() if name != "unk"}
        tokens = self.get("tokenizer.ggml.tokens", list)
        ends = [found["eos_token_id"]] if "eos_token_id" in found else []
        ends += [i for i, token in enumerate(tokens) if token in TURN_ENDS and i not in ends]
        return found if len(ends) < 2 else found | {"eos_token_id": ends}  # noqa: PLR2004


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
