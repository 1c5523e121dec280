"""The errors a user can cause. Each message names the file, line, key or request at fault, and the fix."""

from __future__ import annotations


class EeinferError(Exception):
    """Base of every error whose message is meant for the user: the command line prints it without a traceback."""


class ConfigError(EeinferError):
    """A setting is unknown, of the wrong type or out of range; the message names its origin and dotted key."""


class ModelError(EeinferError):
    """A model folder, checkpoint, tokenizer or chat template cannot be used; the message names the file."""


class HeadsError(EeinferError):
    """Exit heads are malformed or belong to another base model; the message names the file and tensor."""


class DownloadError(EeinferError):
    """A model could not be fetched or did not verify; nothing that looks complete was left behind."""


class RequestError(EeinferError):
    """One request is at fault (prompt, parameters, size). It fails alone; the others run."""
