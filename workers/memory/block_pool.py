"""The block pool: which block is free, cached, live or lent; and the prefix index of cached blocks.

Works on block ids, reference counts and content addresses; touches no tensor.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.workers.errors import InvariantError

ContentKey = tuple[bytes, bytes, bytes]  # key, parent key, token ids as bytes


class CachedBlocks:
    """Blocks without a user whose content is still addressable, in the order of their eviction:
    those that hardly anybody will ask for, then the others; each the longest unused first."""

    def __init__(self) -> None:
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cold) + len(self._others)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._others or block_id in self._cold

    def __iter__(self) -> Iterator[int]:
        yield from self._cold
        yield from self._others

    def add(self, block_id: int, *, cold: bool) -> None:
        (self._cold if cold else self._others)[block_id] = None

    def remove(self, block_id: int) -> bool:
        """Whether it was a cold one."""
        is_cold = block_id in self._cold
        del (self._cold if is_cold else self._others)[block_id]
        return is_cold

    def pop(self) -> tuple[int, bool]:
        """The block to evict first, and whether it is a cold one."""
        is_cold = bool(self._cold)
        return (self._cold if is_cold else self._others).popitem(last=False)[0], is_cold


class BlockPool:
    """Reference-counted block ids, handed out lowest id first.

    Every block is in exactly one of four states: free (in the heap), cached (no user, but its
    content is still addressable in the prefix cache; evicted least recently used first when no
    block is free), live (reference count above zero), or lent (the last blocks, for one step).

    The last `num_tail` blocks are kept for lending while there are others: a cached block below the
    tail is evicted before a free block of the tail is taken. Otherwise one long answer in the tail
    would make every later loan short.
    """

    def __init__(self, num_blocks: int, num_tail: int = 0):
        self.num_blocks = num_blocks
        self.tail_start = num_blocks - num_tail
        self._first_lent = num_blocks  # lent blocks stay in the heap: no id below them is larger
        self._free = list(range(num_blocks))  # a sorted list is a heap
        self._cached = CachedBlocks()  # below the tail
        self._cached_tail = CachedBlocks()
        self._references = [0] * num_blocks
        self.index = PrefixIndex()
        self.on_evict: Callable[[int, bytes, bytes, bytes], None] | None = None

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

    def allocate_spare(self) -> int | None:
        """As `allocate`, but nothing is evicted and the tail is left alone; None: there is none."""
        if not self._free or self._free[0] >= min(self.tail_start, self._first_lent):
            return None
        return self.allocate()

    def retain(self, block_id: int) -> None:
        """One more user of a live or cached block."""
        if self._references[block_id] == 0:
            self._cached_beside(block_id).remove(block_id)
        self._references[block_id] += 1

    def release(self, block_id: int, *, cold: bool = False) -> None:
        """Remove one user; without users the block is cached if it is indexed, else free. `cold`:
        it is evicted before any block that is not, and not kept in host memory then."""
        if self._references[block_id] <= 0:
            raise InvariantError(f"block {block_id} released twice")
        self._references[block_id] -= 1
        if self._references[block_id]:
            return
        if block_id in self.index:
            self._cached_beside(block_id).add(block_id, cold=cold)
        else:
            heapq.heappush(self._free, block_id)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached_beside(block_id)

    def num_lendable(self, limit: int) -> int:
        """How many of the last `limit` blocks are followed by no live block."""
        for num in range(min(limit, self.num_blocks)):
            if self._references[self.num_blocks - 1 - num]:
                return num
        return min(limit, self.num_blocks)

    def lend(self, num: int) -> int:
        """Take the last `num` blocks out of use until `give_back`; returns the id of the first.

        None of them may be live; their cached content is no longer addressable.
        """
        if self.num_lent:
            raise InvariantError("lent twice")
        first = self.num_blocks - num
        if any(self._references[first:]):
            raise InvariantError("a live block would be lent")
        for block_id in range(first, self.num_blocks):
            if self.is_cached(block_id):
                is_cold = self._cached_beside(block_id).remove(block_id)
                self._forget(block_id, keep=not is_cold)
                heapq.heappush(self._free, block_id)
        self._first_lent = first
        return first

    def give_back(self) -> None:
        """The lent blocks are free again, with garbage in them."""
        self._first_lent = self.num_blocks

    def _cached_beside(self, block_id: int) -> CachedBlocks:
        return self._cached if block_id < self.tail_start else self._cached_tail

    def _evict(self, cached: CachedBlocks) -> int:
        block_id, is_cold = cached.pop()
        self._forget(block_id, keep=not is_cold)
        return block_id

    def _forget(self, block_id: int, *, keep: bool) -> None:
        """The content of a cached block is about to be overwritten; `keep`: in host memory."""
        if keep and self.on_evict is not None:
            self.on_evict(block_id, *self.index.content_of(block_id))
        self.index.forget(block_id)

    def check(self, tables: Seq[Seq[int]] | None = None) -> None:
        """Assert that the states are consistent; with the block tables of all sequences, also the
        reference counts."""
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
class _IndexedBlock:
    key: bytes
    parent: bytes
    token_ids: bytes


class PrefixIndex:
    """Content address -> block id. A hit compares parent and tokens, so a collision is a miss."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, _IndexedBlock] = {}

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
            self._entry_of[block_id] = _IndexedBlock(key, parent, token_ids)

    def content_of(self, block_id: int) -> ContentKey:
        """Key, parent and token bytes of an indexed block."""
        entry = self._entry_of[block_id]
        return entry.key, entry.parent, entry.token_ids

    def forget(self, block_id: int) -> None:
        entry = self._entry_of.pop(block_id, None)
        if entry is not None:
            del self._block_of[entry.key]
