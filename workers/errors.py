"""Errors of settings and checkpoints. Their messages name the field or file, and the remedy."""

from __future__ import annotations


class LoadError(RuntimeError):
    """A checkpoint that cannot be used. The message names the file and, if known, the tensor."""


class InvariantError(RuntimeError):
    """Something that the code around it guarantees does not hold: continuing would corrupt data.

    Not an `assert`, which `python -O` leaves out."""


class StoreUnavailable(LoadError):
    """The expert store does not answer: it hangs, or is being restarted."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the key and the remedy."""
