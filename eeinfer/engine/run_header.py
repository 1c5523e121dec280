"""What makes the answers of a run: the header of its journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from eeinfer.config.load import Loaded
from eeinfer.core.request import Request
from eeinfer.engine.build import Located, device_of, dtype_of
from eeinfer.engine.certificate import NO_HEADS
from eeinfer.engine.prompt_file import LineError
from eeinfer.errors import ModelError
from eeinfer.exits.files import heads_fingerprint
from eeinfer.version import own_version

# Names differ between machines for the same files; fingerprints stand for them.
_NAMES = ("model.name", "model.heads")
# What the fingerprint of a model leaves out: how text becomes tokens, and what ends an answer.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


def run_header(
    entries: Sequence[Request | LineError], loaded: Loaded, located: Located, *, token_details: bool
) -> dict[str, Any]:
    """Everything that a line of the answers depends on, as JSON values.

    Args:
        entries: all prompts of the run.
        loaded: the settings in force.
        located: the model and its heads.
        token_details: whether the lines have an entry a token.

    Raises:
        EeinferError: a file of the model or the heads cannot be read, or the device or number type does not fit this
            machine.
    """
    config = {key: value for key, value in loaded.values().items() if key not in _NAMES}
    config["model.device"] = device_of(loaded.settings.model.device).type
    config["model.dtype"] = str(dtype_of(loaded.settings.model.dtype, located.config.dtype)).removeprefix("torch.")
    return {
        "version": own_version(),
        "prompts": {"count": len(entries), "hash": _hash([asdict(entry) for entry in entries])},
        "model": located.base.fingerprint,
        "files": _files(located.folder),
        "heads": NO_HEADS if located.heads is None else heads_fingerprint(located.heads),
        "config": config,
        "calibration": None if loaded.calibration is None else _hash(dict(loaded.calibration.table)),
        "token_details": token_details,
    }


def _files(folder: Path | None) -> dict[str, str]:
    """Hashes of the files in a model's folder that its tokenizer reads, by name."""
    hashes: dict[str, str] = {}
    if folder is None:
        return hashes
    for name in _TEXT_FILES:
        path = folder / name
        try:
            hashes[name] = "sha256:" + sha256(path.read_bytes()).hexdigest()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return hashes


def _hash(value: Any) -> str:
    return "sha256:" + sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
