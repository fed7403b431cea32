"""The block tables of sequences: prefix hits, growth, rolling windows, preemption and release.

Works on block ids and token ids; no tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from penstock.workers.errors import InvariantError
from penstock.workers.memory.block_pool import BlockPool, ContentKey
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.scheduling.states import StateCache
from penstock.workers.scheduling.swap import HostSwap, Swapped


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks of a sequence that the pool still has, the keys of all its blocks up to the last of
    them, and the content keys after that one.

    All leading blocks; or, where tokens are evicted, those of the sinks and of one window, without
    the `num_rolled` blocks between them."""

    blocks: list[int]
    keys: list[bytes]
    rest: list[ContentKey]  # to be looked up in host memory, if there is any
    num_rolled: int = 0


class KVCache:
    """Gives sequences their blocks: prefix hits, growth, commit of full blocks, release.

    `salt` separates what must never be shared (model, number format, server secret): it seeds the
    chain of keyed hashes, key_i = BLAKE2b(key_{i-1} | tokens of block i).
    """

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_cache: bool, salt: bytes):
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.swap: HostSwap | None = None  # host memory for blocks that leave the pool
        self.states: StateCache | None = None  # of models with linear attention
        self._root = hashlib.blake2b(salt, digest_size=16).digest()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_rolled_blocks = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def tokens_to_begin(self, seq: Sequence) -> int:
        """Known tokens that must fit before `seq` is admitted: all that it sees at once."""
        most = seq.context.full_tokens
        return seq.num_tokens if most is None else min(seq.num_tokens, most + self.block_size)

    def admit(self, seq: Sequence, num_kept: int = 0) -> bool:
        """Give `seq` the blocks that it needs to begin, prefix hits included, or change nothing.
        `num_kept` blocks stay available."""
        if seq.block_table or seq.num_rolled_blocks:
            raise InvariantError("admitted with blocks")
        swapped = None if self.swap is None else self.swap.swapped(seq)
        if self.swap is not None and swapped is not None:
            return self._admit_swapped(self.swap, seq, swapped, num_kept)
        reusable = self.prefix_cache and seq.request.params.prompt_logprobs is None
        hit = self._find_prefix(seq) if reusable else Hit([], [], [])
        num_shared = len(hit.blocks)
        if self.states is not None:
            if not self.states.has_room:
                return False
            num = self.states.num_reusable(hit.keys)
            hit = Hit(hit.blocks[:num], hit.keys[:num], [])
        num_found = (hit.num_rolled + len(hit.blocks)) * self.block_size
        begins = self.tokens_to_begin(seq)
        if hit.num_rolled:
            begins = min(seq.num_tokens, num_found + self.block_size)
        num_new = self.blocks_for(begins) - hit.num_rolled - len(hit.blocks)
        num_revived = sum(self.pool.is_cached(b) for b in hit.blocks)
        if num_new > self.pool.num_available - num_revived - num_kept:
            return False
        seq.content_keys = []
        for block_id in hit.blocks:
            self.pool.retain(block_id)
        seq.block_table.extend(hit.blocks)
        seq.block_keys, seq.num_rolled_blocks = hit.keys, hit.num_rolled
        seq.num_computed_tokens = num_found
        if self.states is not None:
            self.states.admit(seq, hit.keys, num_shared)
        grown = self.grow(seq, begins)
        if not grown:
            raise InvariantError("num_available promised these blocks")
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

    def _admit_swapped(
        self, swap: HostSwap, seq: Sequence, swapped: Swapped, num_kept: int
    ) -> bool:
        """Give `seq` blocks for what it had, and for the tokens that it computes next."""
        computed = swapped.num_computed_tokens
        most = min(seq.num_tokens, computed + self.block_size)
        num_new = self.blocks_for(most) - swapped.num_rolled_blocks
        if num_new > self.pool.num_available - num_kept:
            return False
        held = swap.hold(seq)  # else blocks that `grow` evicts could replace it in host memory
        seq.num_rolled_blocks = swapped.num_rolled_blocks
        grown = self.grow(seq, most)
        if not grown:
            raise InvariantError("num_available promised these blocks")
        swap.swap_in(seq, swapped, held)
        return True

    def advance(self, seq: Sequence) -> int:
        """Count finished loads of `seq` as computed; returns how many tokens it may compute now."""
        if self.swap is None:
            return seq.num_pending_tokens
        self.swap.advance(seq)
        limit = self.swap.limit(seq)
        return seq.num_pending_tokens if limit is None else limit - seq.num_computed_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, all or nothing."""
        missing = self.num_missing(seq, num_tokens)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            seq.block_table.append(self.pool.allocate())
        return True

    def grow_spare(self, seq: Sequence, num_tokens: int, wanted: int) -> int:
        """Give `seq` blocks for up to `wanted` tokens after its first `num_tokens`, for which it
        has them; only blocks that nothing else has a use for now. Returns for how many tokens."""
        while self.num_missing(seq, num_tokens + wanted) > 0:
            block_id = self.pool.allocate_spare()
            if block_id is None:
                break
            seq.block_table.append(block_id)
        has = (seq.num_rolled_blocks + len(seq.block_table)) * self.block_size
        return min(wanted, has - num_tokens)

    def give_back(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks of `seq` beyond its first `num_tokens` tokens."""
        for _ in range(-self.num_missing(seq, num_tokens)):
            self.pool.release(seq.block_table.pop())

    def num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `seq` lacks for its first `num_tokens` tokens; negative: it has more."""
        return self.blocks_for(num_tokens) - seq.num_rolled_blocks - len(seq.block_table)

    def room_for(self, seq: Sequence) -> int:
        """Tokens that `seq` could have in all if it took every available block."""
        num_blocks = seq.num_rolled_blocks + len(seq.block_table) + self.pool.num_available
        return num_blocks * self.block_size

    def commit(self, seq: Sequence, num_computed: int) -> None:
        """After a step was read with which the first `num_computed` tokens of `seq` are computed:
        index newly completed blocks, and free blocks that no later token sees."""
        if self.prefix_cache:
            self._index(seq, num_computed)
        if self.states is not None:
            self.states.commit(seq, num_computed)
        rolled = seq.context.window_start(num_computed) // self.block_size
        num_dead = rolled - seq.context.num_sink_blocks - seq.num_rolled_blocks
        if num_dead > 0:
            self._roll(seq, num_dead)

    def _roll(self, seq: Sequence, num_blocks: int) -> None:
        """Move the window on by `num_blocks`, which are freed; no K or V is copied."""
        first, most = seq.context.num_sink_blocks, seq.context.full_tokens
        for i in range(first, first + num_blocks):
            # Blocks from before the first eviction are any request's; for later ones only a text
            # that branches off here asks.
            end = (i + seq.num_rolled_blocks + 1) * self.block_size
            self.pool.release(seq.block_table[i], cold=most is not None and end > most)
        del seq.block_table[first : first + num_blocks]
        seq.num_rolled_blocks += num_blocks
        self.num_rolled_blocks += num_blocks

    def _index(self, seq: Sequence, num_tokens: int) -> None:
        for i in range(len(seq.block_keys), num_tokens // self.block_size):
            parent = seq.block_keys[-1] if seq.block_keys else self._root_of(seq)
            key, parent, token_ids = self._content_key(seq, i, parent)
            place = i if i < seq.context.num_sink_blocks else i - seq.num_rolled_blocks
            self.pool.index.insert(seq.block_table[place], key, parent, token_ids)
            seq.block_keys.append(key)

    def free(self, seq: Sequence) -> None:
        """`seq` has ended: free all its blocks."""
        if self.swap is not None:
            self.swap.forget(seq)
        self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Free all blocks of `seq` for now. Those that the prefix cache cannot address, and those
        after evicted tokens, are swapped out: these could only be recomputed with all before."""
        is_addressable = self.prefix_cache and not seq.num_rolled_blocks
        if self.swap is not None and not is_addressable:
            self.swap.swap_out(seq)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """The last block first, so that a chain is evicted from its end."""
        seq.content_keys = []
        if self.swap is not None:
            self.swap.stop(seq)
        if self.states is not None:
            self.states.release(seq)
        for block_id in reversed(seq.block_table):
            self.pool.release(block_id)
        seq.block_table = array("i")
        seq.block_keys = []
        seq.num_computed_tokens = seq.num_deferred_tokens = seq.num_rolled_blocks = 0

    def forget(self, seq: Sequence) -> None:
        """Remove the blocks of `seq` from the prefix index; `free` must follow."""
        if self.states is not None:
            self.states.forget(seq)
        for block_id in seq.block_table:
            self.pool.index.forget(block_id)

    def _root_of(self, seq: Sequence) -> bytes:
        """First key of the chain of `seq`: by its domain, so that no tenant finds another's blocks.

        Inexact experts and adapters have other keys, too: their K and V differ.
        """
        mode, domain = seq.moe_mode, seq.request.cache_domain
        root = self._root
        if mode != "exact" or domain:
            root = self._key(root, mode.encode() + b"\0" + domain)
        # Its length is no multiple of 4, so that it is not the key of any token ids.
        return root if seq.adapter is None else self._key(root, b"adapter" + seq.adapter.digest)

    def _find_prefix(self, seq: Sequence) -> Hit:
        """The most tokens of `seq` whose K and V need not be computed again."""
        num_tokens, most = seq.num_reusable_tokens, seq.context.full_tokens
        if most is not None and num_tokens > most and (hit := self._find_window(seq)) is not None:
            return hit
        hit = Hit([], [], [])
        for i in range((num_tokens if most is None else min(num_tokens, most)) // self.block_size):
            content = self._content_of(seq, i)
            block_id = None if hit.rest else self.pool.index.find(*content)
            if block_id is not None:
                hit.blocks.append(block_id)
                hit.keys.append(content[0])
            elif self.swap is None:
                break
            else:
                hit.rest.append(content)
        return hit

    def _find_window(self, seq: Sequence) -> Hit | None:
        """The longest part of `seq` after whose end only blocks are seen that the pool has: the
        sinks' and one run. None unless tokens before that end are evicted."""
        context, size = seq.context, self.block_size
        num_sinks = context.num_sink_blocks
        found: list[int | None] = []
        for i in range(seq.num_reusable_tokens // size):
            found.append(self.pool.index.find(*self._content_of(seq, i)))
            if i < num_sinks and found[i] is None:
                return None
        end = len(found)
        while end > num_sinks:
            first = context.window_start(end * size) // size
            if first <= num_sinks:
                return None
            missing = next((i for i in range(end - 1, first - 1, -1) if found[i] is None), None)
            if missing is None:
                blocks = [b for b in (*found[:num_sinks], *found[first:end]) if b is not None]
                keys = [key for key, _, _ in seq.content_keys[:end]]
                return Hit(blocks, keys, [], first - num_sinks)
            end = missing
        return None

    def _content_of(self, seq: Sequence, i: int) -> ContentKey:
        """`_content_key` of block `i`, and of all before it, kept while `seq` waits: a request that
        waits for blocks asks at every step."""
        known = seq.content_keys
        while len(known) <= i:
            parent = known[-1][0] if known else self._root_of(seq)
            known.append(self._content_key(seq, len(known), parent))
        return known[i]

    def _content_key(self, seq: Sequence, i: int, parent: bytes) -> ContentKey:
        """The address of block `i` of `seq` after its block with the key `parent`.

        Until a token is evicted, K and V depend on the earlier tokens alone, and are shared with
        requests of any policy; from then on with those of the same one."""
        most = seq.context.full_tokens
        if most is not None and i * self.block_size <= most < (i + 1) * self.block_size:
            parent = self._key(parent, seq.context.name)
        token_ids = self._tokens_of_block(seq.token_ids, i)
        return self._key(parent, token_ids), parent, token_ids

    def _tokens_of_block(self, token_ids: array[int], i: int) -> bytes:
        return token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def _key(self, parent: bytes, token_ids: bytes) -> bytes:
        return hashlib.blake2b(token_ids, digest_size=16, key=parent).digest()
