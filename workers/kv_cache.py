"""Which block belongs to whom: the block pool, the prefix cache, and the blocks of a sequence.

Knows ids, counts and token values; nothing of tensors, bytes or steps.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.workers.host_tier import ContentKey
from penstock.workers.sequence import Sequence
from penstock.workers.swap import HostSwap, Swapped


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
                self._forget(block_id)
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
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        """The content of a cached block is about to be overwritten."""
        if self.on_evict is not None:
            self.on_evict(block_id, *self.index.content_of(block_id))
        self.index.forget(block_id)

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

    def content_of(self, block_id: int) -> ContentKey:
        """Key, parent and token bytes of an indexed block."""
        entry = self._entry_of[block_id]
        return entry.key, entry.parent, entry.token_ids

    def forget(self, block_id: int) -> None:
        entry = self._entry_of.pop(block_id, None)
        if entry is not None:
            del self._block_of[entry.key]


@dataclass(frozen=True, slots=True)
class Hit:
    """Leading blocks of a sequence that the pool still has, and the chain of those behind them."""

    blocks: list[int]
    keys: list[bytes]
    rest: list[ContentKey]  # of host memory, where there is any


class KVCache:
    """Gives sequences their blocks: prefix hits, growth, commit of full blocks, release.

    `salt` separates what must never be shared (model, number format, server secret): it seeds the
    chain of keyed hashes, key_i = BLAKE2b(key_{i-1} | tokens of block i).
    """

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_cache: bool, salt: bytes):
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.swap: HostSwap | None = None  # host memory for what leaves the pool
        self._root = hashlib.blake2b(salt, digest_size=16).digest()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_rolled_blocks = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def tokens_to_begin(self, seq: Sequence) -> int:
        """So many of the known tokens must fit before `seq` comes in: all that it sees at once."""
        most = seq.context.full_tokens
        return seq.num_tokens if most is None else min(seq.num_tokens, most + self.block_size)

    def admit(self, seq: Sequence) -> bool:
        """Give `seq` what it needs to begin, prefix hits included, or change nothing."""
        assert not seq.block_table and not seq.num_rolled_blocks, "admitted with blocks"
        swapped = None if self.swap is None else self.swap.swapped(seq)
        if self.swap is not None and swapped is not None:
            return self._admit_swapped(self.swap, seq, swapped)
        reusable = self.prefix_cache and seq.request.params.prompt_logprobs is None
        hit = self._find_prefix(seq) if reusable else Hit([], [], [])
        num_new = self.blocks_for(self.tokens_to_begin(seq)) - len(hit.blocks)
        num_revived = sum(self.pool.is_cached(b) for b in hit.blocks)
        if num_new > self.pool.num_available - num_revived:
            return False
        for block_id in hit.blocks:
            self.pool.retain(block_id)
        seq.block_table.extend(hit.blocks)
        seq.block_keys = hit.keys
        seq.num_computed_tokens = len(hit.blocks) * self.block_size
        grown = self.grow(seq, self.tokens_to_begin(seq))
        assert grown, "there were enough blocks a moment ago"
        num_cached = seq.num_computed_tokens
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += num_cached
        plan = self.swap.plan(hit.rest) if self.swap is not None else None
        if self.swap is not None and plan is not None:
            self.swap.load(seq, hit.rest, plan, seq.num_computed_tokens)
            num_cached += plan.num_loaded
        if seq.num_generated_tokens == len(seq.request.emitted_ids):
            seq.num_cached_tokens = min(num_cached, seq.num_prompt_tokens)
        return True

    def _admit_swapped(self, swap: HostSwap, seq: Sequence, swapped: Swapped) -> bool:
        """Blocks for what `seq` had, and for the tokens that it computes next."""
        computed = swapped.num_computed_tokens
        most = min(seq.num_tokens, computed + self.block_size)
        if self.blocks_for(most) - swapped.num_rolled_blocks > self.pool.num_available:
            return False
        seq.num_rolled_blocks = swapped.num_rolled_blocks
        grown = self.grow(seq, most)
        assert grown, "there were enough blocks a moment ago"
        swap.swap_in(seq, swapped)
        return True

    def advance(self, seq: Sequence) -> int:
        """Take in what has been loaded for `seq`; how many tokens it may compute now."""
        if self.swap is None:
            return seq.num_pending_tokens
        self.swap.advance(seq)
        limit = self.swap.limit(seq)
        return seq.num_pending_tokens if limit is None else limit - seq.num_computed_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, all or nothing."""
        missing = self.blocks_for(num_tokens) - seq.num_rolled_blocks - len(seq.block_table)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            seq.block_table.append(self.pool.allocate())
        return True

    def room_for(self, seq: Sequence) -> int:
        """Tokens that `seq` could have in all if it took every available block."""
        num_blocks = seq.num_rolled_blocks + len(seq.block_table) + self.pool.num_available
        return num_blocks * self.block_size

    def commit(self, seq: Sequence) -> None:
        """After the forward pass: make the newly completed blocks of `seq` addressable, and give
        back those that none of its coming tokens sees."""
        if self.prefix_cache:
            self._index(seq)
        rolled = seq.context.window_start(seq.num_computed_tokens) // self.block_size
        num_dead = rolled - seq.context.num_sink_blocks - seq.num_rolled_blocks
        if num_dead > 0:
            self._roll(seq, num_dead)

    def _roll(self, seq: Sequence, num_blocks: int) -> None:
        """The window moves on by so many blocks: no byte of K or V does."""
        first = seq.context.num_sink_blocks
        for block_id in seq.block_table[first : first + num_blocks]:
            self.pool.release(block_id)
        del seq.block_table[first : first + num_blocks]
        seq.num_rolled_blocks += num_blocks
        self.num_rolled_blocks += num_blocks

    def _index(self, seq: Sequence) -> None:
        # What was computed before anything was evicted depends on the tokens before it alone, and
        # is shared with requests of any policy; what came later is not.
        num_tokens, most = seq.num_computed_tokens, seq.context.full_tokens
        if most is not None:
            num_tokens = min(num_tokens, most)
        for i in range(len(seq.block_keys), num_tokens // self.block_size):
            parent = seq.block_keys[-1] if seq.block_keys else self._root
            token_ids = self._tokens_of_block(seq.token_ids, i)
            key = self._key(parent, token_ids)
            self.pool.index.insert(seq.block_table[i], key, parent, token_ids)
            seq.block_keys.append(key)

    def free(self, seq: Sequence) -> None:
        """`seq` has ended: give all blocks back."""
        if self.swap is not None:
            self.swap.forget(seq)
        self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Give all blocks back for now. What no other sequence could make use of is swapped out:
        behind evicted tokens, K and V could only be had by computing all of them again."""
        is_addressable = self.prefix_cache and not seq.num_rolled_blocks
        if self.swap is not None and not is_addressable:
            self.swap.swap_out(seq)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """The last block first, so that a chain is evicted from its end."""
        if self.swap is not None:
            self.swap.stop(seq)
        for block_id in reversed(seq.block_table):
            self.pool.release(block_id)
        seq.block_table = array("i")
        seq.block_keys = []
        seq.num_computed_tokens = seq.num_deferred_tokens = seq.num_rolled_blocks = 0

    def forget(self, seq: Sequence) -> None:
        """As `free`, but what only this sequence has written is no longer addressable."""
        for block_id in seq.block_table:
            self.pool.index.forget(block_id)
        self.free(seq)

    def _find_prefix(self, seq: Sequence) -> Hit:
        hit = Hit([], [], [])
        parent = self._root
        num_tokens, most = seq.num_tokens - 1, seq.context.full_tokens
        if most is not None:
            num_tokens = min(num_tokens, most)
        for i in range(num_tokens // self.block_size):
            token_ids = self._tokens_of_block(seq.token_ids, i)
            key = self._key(parent, token_ids)
            block_id = None if hit.rest else self.pool.index.find(key, parent, token_ids)
            if block_id is not None:
                hit.blocks.append(block_id)
                hit.keys.append(key)
            elif self.swap is None:
                break
            else:
                hit.rest.append((key, parent, token_ids))
            parent = key
        return hit

    def _tokens_of_block(self, token_ids: array[int], i: int) -> bytes:
        return token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def _key(self, parent: bytes, token_ids: bytes) -> bytes:
        return hashlib.blake2b(token_ids, digest_size=16, key=parent).digest()
