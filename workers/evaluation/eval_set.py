"""The tokens that all combinations see: windows of texts, and prompts to continue.

Token ids only; the caller has the texts. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.workers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EvalSet:
    """`windows`: equally long; every token but the first of each is scored. `prompts`: continued
    greedily by `num_new` tokens each; none where that is 0."""

    windows: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    num_new: int = 0

    @property
    def window_tokens(self) -> int:
        return len(self.windows[0])

    @property
    def num_scored(self) -> int:
        """Tokens that are scored, in all windows."""
        return len(self.windows) * (self.window_tokens - 1)


def cut_windows(
    texts: Sequence[Sequence[int]], count: int, length: int, prefix: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """`count` windows of `length` ids from the texts in turn: evenly over each, none overlaps.

    Each begins with `prefix` (what the tokenizer puts before a text), which is part of its length.
    Raises ConfigError where a text is too short.
    """
    size = length - len(prefix)
    if size < 2:
        raise ConfigError(f"a window of {length} tokens is too short; give at least 16")
    found: list[tuple[int, ...]] = []
    for i in range(count):
        ids, place = texts[i % len(texts)], i // len(texts)
        share = len(range(i % len(texts), count, len(texts)))  # windows of this text
        if len(ids) < share * size:
            raise ConfigError(
                f"text {i % len(texts) + 1} has {len(ids):,} tokens, and {share} windows of it "
                f"take {share * size:,}: give a longer text, fewer windows (--windows) or shorter "
                "ones (--window-tokens)"
            )
        start = (2 * place + 1) * len(ids) // (2 * share) - size // 2
        start = max(0, min(start, len(ids) - size))
        found.append((*prefix, *ids[start : start + size]))
    return tuple(found)
