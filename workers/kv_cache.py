"""Which block belongs to whom: the block pool, the prefix cache, and the blocks of a sequence.

Knows ids, counts and token values; nothing of tensors, bytes or steps.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.workers.sequence import Sequence


class BlockPool:
    """Reference-counted block ids, handed out lowest id first.

    Every block is in exactly one of: free (in the heap), cached (no user, but its content is still
    addressable in the prefix cache; evicted least recently used first when free ones run out),
    live (reference count above zero), or lent (the last blocks, for one step).

    The last `num_tail` blocks are kept for lending as long as there are others: a cached block
    elsewhere is evicted before a free one of the tail is taken, or else one long answer there would
    make every later loan short.
    """

    def __init__(self, num_blocks: int, num_tail: int = 0):
        self.num_blocks = num_blocks
        self.tail_start = num_blocks - num_tail
        self._first_lent = num_blocks  # lent blocks stay in the heap: no id below them is larger
        self._free = list(range(num_blocks))  # a sorted list is a heap
        self._cached: OrderedDict[int, None] = OrderedDict()  # below the tail
        self._cached_tail: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self.index = PrefixIndex()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + self.num_cached - self.num_lent

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._cached_tail)

    @property
    def num_lent(self) -> int:
        return self.num_blocks - self._first_lent

    @property
    def num_live(self) -> int:
        return self.num_blocks - self.num_available - self.num_lent

    def allocate(self) -> int:
        """A block with garbage in it, reference count 1. Call only while `num_available` > 0."""
        lowest = self._free[0] if self._free else self.num_blocks
        if lowest < min(self.tail_start, self._first_lent):
            heapq.heappop(self._free)
        elif self._cached:
            lowest = self._evict(self._cached)
        elif lowest < self._first_lent:
            heapq.heappop(self._free)
        else:
            lowest = self._evict(self._cached_tail)
        self._references[lowest] = 1
        return lowest

    def retain(self, block_id: int) -> None:
        """One more user of a live or cached block."""
        if self._references[block_id] == 0:
            del self._cached_beside(block_id)[block_id]
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """One user less; the last one leaves the block cached if it is indexed, else free."""
        assert self._references[block_id] > 0, f"block {block_id} released twice"
        self._references[block_id] -= 1
        if self._references[block_id]:
            return
        if block_id in self.index:
            self._cached_beside(block_id)[block_id] = None
        else:
            heapq.heappush(self._free, block_id)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached_beside(block_id)

    def num_lendable(self, limit: int) -> int:
        """How many of the last `limit` blocks have no live one behind them."""
        for num in range(min(limit, self.num_blocks)):
            if self._references[self.num_blocks - 1 - num]:
                return num
        return min(limit, self.num_blocks)

    def lend(self, num: int) -> int:
        """Take the last `num` blocks out of use until `give_back`; returns the first one's id.

        None of them may be live, and what was cached in them is no longer addressable.
        """
        assert not self.num_lent, "lent twice"
        first = self.num_blocks - num
        assert not any(self._references[first:]), "a live block would be lent"
        for block_id in range(first, self.num_blocks):
            if self.is_cached(block_id):
                del self._cached_beside(block_id)[block_id]
                self.index.forget(block_id)
                heapq.heappush(self._free, block_id)
        self._first_lent = first
        return first

    def give_back(self) -> None:
        """The lent blocks are free again, with garbage in them."""
        self._first_lent = self.num_blocks

    def _cached_beside(self, block_id: int) -> OrderedDict[int, None]:
        return self._cached if block_id < self.tail_start else self._cached_tail

    def _evict(self, cached: OrderedDict[int, None]) -> int:
        block_id, _ = cached.popitem(last=False)
        self.index.forget(block_id)
        return block_id

    def check(self, tables: Seq[Seq[int]] | None = None) -> None:
        """Assert the ledger; with the block tables of all sequences, the reference counts too."""
        free, cached = set(self._free), {*self._cached, *self._cached_tail}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.issuperset(range(self._first_lent, self.num_blocks)), "a lent block is in use"
        assert all(block_id < self.tail_start for block_id in self._cached)
        assert all(block_id >= self.tail_start for block_id in self._cached_tail)
        assert not free & cached, "a block is free and cached"
        for block_id, references in enumerate(self._references):
            idle = block_id in free or block_id in cached
            assert idle == (references == 0), f"block {block_id}: {references} users, idle={idle}"
        assert all(block_id in self.index for block_id in cached), "cached but not addressable"
        assert not any(block_id in self.index for block_id in free), "free but addressable"
        if tables is not None:
            counts = [0] * self.num_blocks
            for table in tables:
                for block_id in table:
                    counts[block_id] += 1
            assert counts == self._references, "reference counts differ from the block tables"


@dataclass(frozen=True, slots=True)
class _Entry:
    key: bytes
    parent: bytes
    token_ids: bytes


class PrefixIndex:
    """Content address -> block id. A hit compares parent and tokens, so a collision is a miss."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, _Entry] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def find(self, key: bytes, parent: bytes, token_ids: bytes) -> int | None:
        block_id = self._block_of.get(key)
        if block_id is None:
            return None
        entry = self._entry_of[block_id]
        return block_id if (entry.parent, entry.token_ids) == (parent, token_ids) else None

    def insert(self, block_id: int, key: bytes, parent: bytes, token_ids: bytes) -> None:
        """Make a block addressable; a key that is already taken keeps its first block."""
        if key not in self._block_of:
            self._block_of[key] = block_id
            self._entry_of[block_id] = _Entry(key, parent, token_ids)

    def forget(self, block_id: int) -> None:
        entry = self._entry_of.pop(block_id, None)
        if entry is not None:
            del self._block_of[entry.key]


class KVCache:
    """Gives sequences their blocks: prefix hits, growth, commit of full blocks, release.

    `salt` separates what must never be shared (model, number format, server secret): it seeds the
    chain of keyed hashes, key_i = BLAKE2b(key_{i-1} | tokens of block i).
    """

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_cache: bool, salt: bytes):
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._root = hashlib.blake2b(salt, digest_size=16).digest()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence) -> bool:
        """Take the prefix hits if the rest of the known tokens fits too; else change nothing."""
        assert not seq.block_table, "admitted with blocks"
        reusable = self.prefix_cache and seq.request.params.prompt_logprobs is None
        blocks, keys = self._find_prefix(seq) if reusable else ([], [])
        num_new = self.blocks_for(seq.num_tokens) - len(blocks)
        num_revived = sum(self.pool.is_cached(b) for b in blocks)
        if num_new > self.pool.num_available - num_revived:
            return False
        for block_id in blocks:
            self.pool.retain(block_id)
        seq.block_table.extend(blocks)
        seq.block_keys = keys
        seq.num_computed_tokens = len(blocks) * self.block_size
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens
        if seq.num_generated_tokens == len(seq.request.emitted_ids):
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, all or nothing."""
        missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            seq.block_table.append(self.pool.allocate())
        return True

    def room_for(self, seq: Sequence) -> int:
        """Tokens that `seq` could have in all if it took every available block."""
        return (len(seq.block_table) + self.pool.num_available) * self.block_size

    def commit(self, seq: Sequence) -> None:
        """After the forward pass: make the newly completed blocks of `seq` addressable."""
        if not self.prefix_cache:
            return
        for i in range(len(seq.block_keys), seq.num_computed_tokens // self.block_size):
            parent = seq.block_keys[-1] if seq.block_keys else self._root
            token_ids = self._tokens_of_block(seq.token_ids, i)
            key = self._key(parent, token_ids)
            self.pool.index.insert(seq.block_table[i], key, parent, token_ids)
            seq.block_keys.append(key)

    def free(self, seq: Sequence) -> None:
        """Give all blocks back, last one first, so that a chain is evicted from its end."""
        for block_id in reversed(seq.block_table):
            self.pool.release(block_id)
        seq.block_table = array("i")
        seq.block_keys = []
        seq.num_computed_tokens = 0

    def forget(self, seq: Sequence) -> None:
        """As `free`, but what only this sequence has written is no longer addressable."""
        for block_id in seq.block_table:
            self.pool.index.forget(block_id)
        self.free(seq)

    def _find_prefix(self, seq: Sequence) -> tuple[list[int], list[bytes]]:
        blocks: list[int] = []
        keys: list[bytes] = []
        parent = self._root
        for i in range((seq.num_tokens - 1) // self.block_size):
            token_ids = self._tokens_of_block(seq.token_ids, i)
            key = self._key(parent, token_ids)
            block_id = self.pool.index.find(key, parent, token_ids)
            if block_id is None:
                break
            blocks.append(block_id)
            keys.append(key)
            parent = key
        return blocks, keys

    def _tokens_of_block(self, token_ids: array[int], i: int) -> bytes:
        return token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def _key(self, parent: bytes, token_ids: bytes) -> bytes:
        return hashlib.blake2b(token_ids, digest_size=16, key=parent).digest()
