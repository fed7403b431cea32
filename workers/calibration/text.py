"""The text that a model is calibrated on, as windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.workers.errors import ConfigError
from penstock.workers.text.tokenizer import Tokenizer

WINDOW = 1024
NUM_TOKENS = 16_384
MIN_TOKENS = 4096
MAX_TEXT_BYTES = 2**30


def read_windows(
    file: Path, model: Path, *, num_tokens: int = NUM_TOKENS, context: int
) -> list[list[int]]:
    """About `num_tokens` ids of the text in `file`, in windows of one length that lie evenly over
    it; each begins with the special tokens that the tokenizer of `model` begins a text with.

    `context`: the longest that the model takes. Raises ConfigError for a file that cannot be read
    or is too short.
    """
    try:
        if file.stat().st_size > MAX_TEXT_BYTES:
            raise ConfigError(f"--calibrate: {file} is larger than 1 GiB; give a part of it")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--calibrate: {file} cannot be read as UTF-8 text: {error}") from error
    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    least = min(num_tokens, MIN_TOKENS)
    if len(ids) < least:
        raise ConfigError(
            f"--calibrate: {file} has {len(ids)} tokens; at least {least} are needed, and "
            f"{num_tokens} are used if there are as many"
        )
    return windows_of(ids, num_tokens, context, tokenizer.prefix_ids)


def windows_of(
    ids: Sequence[int], num_tokens: int, context: int, begin: Sequence[int] = ()
) -> list[list[int]]:
    """Windows of one length, `begin` included, evenly over `ids`; they do not overlap."""
    length = min(WINDOW, context, num_tokens)
    step = length - len(begin)
    num_windows = max(1, min(num_tokens // length, len(ids) // step))
    step = min(step, len(ids))
    spare = len(ids) - num_windows * step
    starts = [i * step + spare * i // max(1, num_windows - 1) for i in range(num_windows)]
    return [[*begin, *ids[start : start + step]] for start in starts]
