"""Which tokens of each sequence have the K and V of a draft model that has memory of its own.

Its blocks have the numbers of the model's. It computes them later than the model does, and only
where it is asked for drafts. Whatever is wrong in them makes drafts worse, and no answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.scheduling.plan import Chunk
from penstock.workers.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Progress:
    num_computed: int
    num_preemptions: int  # of the sequence: after one more its blocks are others
    num_noted: int = 0  # blocks
    fed_at: int = 0
    fed: tuple[int, ...] = ()  # ids at `fed_at` and after it, which may be wrong drafts


class DraftProgress:
    """By sequence; and by block the key of its contents, so that prefixes are shared."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._of: dict[Sequence, _Progress] = {}
        self._keys: dict[int, bytes] = {}

    def num_computed(self, seq: Sequence, most: int) -> int:
        """Leading tokens of `seq`, up to `most`, whose K and V are there, or are not seen again."""
        known = self._of.get(seq)
        if known is None or known.num_preemptions != seq.num_preemptions:
            known = self._of[seq] = _Progress(self._num_shared(seq), seq.num_preemptions)
        if known.fed:
            ids = seq.token_ids[known.fed_at : known.fed_at + len(known.fed)]
            pairs = zip(known.fed, ids)
            num_right = next((i for i, (fed, own) in enumerate(pairs) if fed != own), len(ids))
            known.num_computed, known.fed = known.fed_at + num_right, ()
        if seq.num_rolled_blocks:
            known.num_computed = max(known.num_computed, self._first_whole(seq, most))
        self._note(seq, known)
        return min(known.num_computed, most)

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """K and V of the first `num_tokens` are there."""
        self._of[seq].num_computed = num_tokens

    def fed(self, chunk: Chunk, num_tokens: int) -> None:
        """K and V of `num_tokens` of `chunk` and its draft have been computed."""
        if not num_tokens:
            return
        known, newest = self._of[chunk.seq], chunk.seq.token_ids[chunk.start]
        known.fed_at, known.fed = chunk.start, (newest, *chunk.drafts)[:num_tokens]

    def end(self, seq: Sequence) -> None:
        """`seq` has ended."""
        self._of.pop(seq, None)

    def _first_whole(self, seq: Sequence, most: int) -> int:
        """The first of the tokens before `most` that sees nothing of what has been evicted."""
        kept = (seq.context.num_sink_blocks + seq.num_rolled_blocks) * self._block_size
        first = most
        while first > kept and seq.context.window_start(first - 1) >= kept:
            first -= 1
        return first

    def _num_shared(self, seq: Sequence) -> int:
        """Leading tokens of `seq` whose blocks another sequence has had the draft model compute."""
        if seq.num_rolled_blocks:
            return 0
        keys = zip(seq.block_table, seq.block_keys)
        num = next((i for i, (at, key) in enumerate(keys) if self._keys.get(at) != key), None)
        return (len(seq.block_keys) if num is None else num) * self._block_size

    def _note(self, seq: Sequence, known: _Progress) -> None:
        """The keys of blocks that are complete."""
        if seq.num_rolled_blocks:
            return
        end = min(known.num_computed // self._block_size, len(seq.block_keys))
        for i in range(known.num_noted, end):
            self._keys[seq.block_table[i]] = seq.block_keys[i]
        known.num_noted = max(known.num_noted, end)
