"""Hidden states in files, mapped into memory: what heads are trained on may be larger than memory.

A folder holds one file a split, the states of all its tokens at each depth in turn, and `complete.json`, which is
written last. Without it the files are made anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eeinfer.errors import EeinferError
from eeinfer.model.decoder import Decoder
from eeinfer.training.traces import Answered, hidden_states

COMPLETE = "complete.json"
PIECE = 4096  # tokens at a time


def state_files(
    decoder: Decoder,
    splits: Mapping[str, Sequence[Answered]],
    ends: Sequence[int],
    folder: Path,
    note: Callable[[str], None],
) -> dict[str, Tensor]:
    """The states of each split, [ends, n, d] in the model's type, on the CPU: read from the disk as they are used.

    Args:
        decoder: the model.
        splits: answers by the name of their split, none empty; n counts the tokens that predicted an answer token.
        ends: depths, as layers executed, increasing.
        folder: of the files; its name tells apart models, answers and depths.
        note: called with one-line notices.

    Raises:
        EeinferError: the disk is full, or the folder cannot be used.
    """
    d, size = decoder.config.hidden_size, decoder.dtype.itemsize
    tokens = {name: sum(len(a.tokens) - a.first for a in answers) for name, answers in splits.items()}
    contents = {"ends": list(ends), "tokens": tokens, "hidden_size": d, "dtype": str(decoder.dtype)}
    try:
        if not _is_complete(folder, contents):
            _make_room(folder, sum(tokens.values()) * len(ends) * d * size, note)
            for name, answers in splits.items():
                _write(decoder, answers, ends, folder / f"{name}.bin", tokens[name])
            (folder / COMPLETE).write_text(json.dumps(contents) + "\n", encoding="utf-8")
    except OSError as error:
        raise EeinferError(f"{folder}: {error.strerror or error}; name another folder with --work") from None
    return {
        name: torch.from_file(
            str(folder / f"{name}.bin"), shared=False, size=len(ends) * n * d, dtype=decoder.dtype
        ).view(len(ends), n, d)
        for name, n in tokens.items()
    }


def pieces(states: Tensor, rows: int = PIECE) -> Iterator[Tensor]:
    """[ends, n, d] in pieces of at most so many tokens."""
    yield from states.split(rows, dim=1)


def _is_complete(folder: Path, contents: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads((folder / COMPLETE).read_text(encoding="utf-8")) == contents)
    except (FileNotFoundError, ValueError):
        return False


def _make_room(folder: Path, size: int, note: Callable[[str], None]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    what = f"the hidden states of the answers take {size / 2**30:.1f} GiB in {folder}"
    if size > free:
        raise EeinferError(f"{what}, where {free / 2**30:.1f} GiB are free; use fewer prompts, or another --work")
    note(what)


def _write(decoder: Decoder, answers: Sequence[Answered], ends: Sequence[int], path: Path, tokens: int) -> None:
    """One file, [ends, tokens, d]; each group of answers goes to its place at every depth."""
    row = decoder.config.hidden_size * decoder.dtype.itemsize
    done = 0
    with path.open("wb") as file:
        for states in hidden_states(decoder, answers, ends):
            for i, state in enumerate(states):
                file.seek((i * tokens + done) * row)
                file.write(state.cpu().contiguous().view(torch.uint8).numpy().data)
            done += len(states[0])
    assert done == tokens
