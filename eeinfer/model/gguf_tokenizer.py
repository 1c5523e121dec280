"""Tokenizers rebuilt from the metadata of a GGUF file: byte-level BPE, or SentencePiece's BPE with byte fallback.

The file holds vocabulary, merges or scores, and the *name* of a pre-tokenizer, whose rules live in llama.cpp
(`llama-vocab.cpp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eeinfer.model.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama_token_type in llama.h
SPACE = "\u2581"  # how SentencePiece spells a space

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
    "qwen2": (LLAMA3_SPLIT.replace("{1,3}", ""),),
    "smollm": (r"\p{N}", GPT2_SPLIT),
}


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer; control tokens are special, user-defined ones matched whole but kept in text.

    As in llama.cpp, bytes without a token of their own (some vocabularies leave out control characters) are dropped.
    """
    from tokenizers import AddedToken, Tokenizer

    if (name := gguf.get("tokenizer.ggml.model", str)) not in ("gpt2", "llama"):
        raise gguf.unsupported(f"tokenizer {name!r} cannot be imported (known: gpt2, llama)")
    kinds = gguf.get("tokenizer.ggml.token_type", list)
    try:
        tokens = list(zip(gguf.get("tokenizer.ggml.tokens", list), kinds, strict=True))
        vocabulary = {token: i for i, (token, kind) in enumerate(tokens) if kind != UNUSED}
        tokenizer = Tokenizer((_byte_level if name == "gpt2" else _sentence_piece)(gguf, vocabulary))
    except Exception as error:  # the library raises nothing narrower
        raise gguf.damaged(f"vocabulary, token types and merges do not fit ({error})") from error
    marked = [(token, kind == CONTROL) for token, kind in tokens if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in marked])
    (_set_byte_level_rules if name == "gpt2" else _set_sentence_piece_rules)(tokenizer, gguf)
    if adds_bos(gguf):
        _put_bos_in_front(tokenizer, gguf)
    return tokenizer


def _put_bos_in_front(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    from tokenizers.processors import TemplateProcessing

    bos_id = gguf.get("tokenizer.ggml.bos_token_id", int)
    bos = gguf.get("tokenizer.ggml.tokens", list)[bos_id]
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])


# Byte-level BPE


def _byte_level(gguf: GgufFile, vocabulary: dict[str, int]) -> BPE:
    from tokenizers.models import BPE

    merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges", list)]
    return BPE(vocab=vocabulary, merges=merges, ignore_merges=gguf.get("tokenizer.ggml.pre", str) == "llama-bpe")


def _set_byte_level_rules(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """How text is cut before the merges, and how tokens are joined again."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if (kind := gguf.get("tokenizer.ggml.pre", str)) not in PRE_TOKENIZERS:
        raise gguf.unsupported(f"tokenizer.ggml.pre is {kind!r}, known are {', '.join(PRE_TOKENIZERS)}")
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()


# SentencePiece


def _sentence_piece(gguf: GgufFile, vocabulary: dict[str, int]) -> BPE:
    from tokenizers.models import BPE

    unknown = gguf.special_tokens().get("unk")
    return BPE(
        vocab=vocabulary,
        merges=merges_of(gguf),
        unk_token=None if unknown is None else gguf.get("tokenizer.ggml.tokens", list)[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )


def merges_of(gguf: GgufFile) -> list[tuple[str, str]]:
    """Merges that do what the scores say: of all neighbours that form a token, those of the best one merge first."""
    columns = [gguf.get(f"tokenizer.ggml.{name}", list) for name in ("tokens", "scores", "token_type")]
    scores = {token: score for token, score, kind in zip(*columns, strict=True) if kind == NORMAL}
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)  # stable: equals keep the order of their ids
    halves = ((token[:i], token[i:]) for token in ranked for i in range(1, len(token)))
    return [(left, right) for left, right in halves if left in scores and right in scores]


def _set_sentence_piece_rules(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """Spaces are spelled as a character of their own; some vocabularies want one in front of the text."""
    from tokenizers import decoders, normalizers

    prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    spell = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spell] if prefix else spell)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)


# tokenizer_config.json


def adds_bos(gguf: GgufFile) -> bool:
    """llama.cpp's rule: what the file says; when it does not say, SentencePiece and Llama 3 vocabularies do."""
    usual = gguf.metadata.get("tokenizer.ggml.pre") == "llama-bpe" or gguf.metadata["tokenizer.ggml.model"] == "llama"
    return gguf.get("tokenizer.ggml.add_bos_token", bool, usual)


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: chat template, special tokens as strings, whether encoding adds BOS."""
    tokens = gguf.get("tokenizer.ggml.tokens", list)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.own("context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(gguf),
        **{f"{name}_token": tokens[token_id] for name, token_id in gguf.special_tokens().items()},
        "chat_template": gguf.metadata.get("tokenizer.chat_template"),
    }
