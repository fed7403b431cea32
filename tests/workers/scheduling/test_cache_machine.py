"""Scheduler, pool, prefix cache, loans, rolls, deferrals, swaps and recurrent states together,
against a simple model.

Instead of K and V, a slot holds a digest of all tokens up to its own, and of the policy once tokens
were evicted. So in each step it can be
seen of every row whether the block table leads to just the keys that its policy lets it see,
whatever has been shared, rolled, deferred, evicted, swapped or loaded before. A recurrent state
is the digest of all tokens that it has seen. A step that is
launched ahead computes as late as it may, with whatever the host has done to memory since.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.workers.context_policy import FULL, Context, SinkWindow
from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.memory.copier import Transfer
from penstock.workers.memory.host_tier import HostTier
from penstock.workers.memory.restore import RestoreRule
from penstock.workers.memory.state_slots import StatePool
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.deferral import Deferral
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.plan import NO_STATE, Chunk
from penstock.workers.scheduling.scheduler import Scheduler
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.scheduling.states import StateCache
from penstock.workers.scheduling.swap import HostSwap
from tests.workers.commit_rules import GivenRule

ALPHABET = 2  # few tokens, so that prompts begin alike
STOP = ALPHABET
POISON = -1


class CoinRule(GivenRule):
    """Tokens may wait as long as the coins say."""

    def __init__(self):
        super().__init__(self._coin, most=9)
        self.coins = [True]

    def _coin(self, num_pending, num_scheduled):
        return self.coins[(num_pending + num_scheduled) % len(self.coins)]


def digest(token_ids, policy=b""):
    raw = hashlib.blake2b(array("i", token_ids).tobytes() + policy, digest_size=7).digest()
    return int.from_bytes(raw, "big")


@dataclass
class Row:
    """A chunk as the device was given it: what the host changes later is of no effect."""

    chunk: Chunk
    table: list[int]
    num_rolled: int
    digests: list[int]
    samples: bool


@dataclass
class StepInFlight:
    rows: list[Row]
    first_lent: int
    is_computed: bool = False


class HeldTransfer(Transfer):
    """Ends when the link says so, or at once when no sequence needs it any more."""

    def cancel(self):
        super().cancel()
        self._end()


class HeldLink:
    """A link whose loads arrive when the machine says, so that a run can be repeated."""

    def __init__(self):
        self.transfers = []

    def submit(self, pairs):
        transfer = HeldTransfer(list(pairs))
        self.transfers.append(transfer)
        return transfer

    def bytes_per_s(self):
        return None

    def arrive(self, num):
        """This number of the oldest loads are done."""
        arrived, self.transfers = self.transfers[:num], self.transfers[num:]
        for transfer in arrived:
            if not transfer.is_done:
                for source, out in transfer._pairs:
                    out.copy_(source)
                    transfer.num_done += 1
                transfer._end()


class Machine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from((1, 2, 4)),
        num_blocks=st.integers(12, 30),
        num_slots=st.integers(0, 40),
        prefix_cache=st.booleans(),
        deferral=st.sampled_from((None, "pressure", "always")),
        restore=st.sampled_from(("auto", "load", "recompute", "split")),
        max_tokens=st.integers(4, 24),
        async_scheduling=st.booleans(),
        num_states=st.sampled_from((0, 0, 2, 5, 9, 30)),
    )
    def begin(
        self, block_size, num_blocks, num_slots, prefix_cache, deferral, restore, max_tokens,
        async_scheduling, num_states,
    ):  # fmt: skip
        self.size = block_size
        num_scratch = 6 if deferral else 0
        # The last blocks are scratch: their ids follow those of the pool.
        self.memory = torch.full((num_blocks + num_scratch, block_size), POISON)
        self.pool = BlockPool(num_blocks, num_tail=num_blocks // 4)
        self.cache = KVCache(self.pool, block_size, prefix_cache=prefix_cache, salt=b"salt")
        self.states = [POISON] * num_states  # by slot; none: no recurrent states
        if num_states:
            self.cache.states = StateCache(
                StatePool(num_states), block_size, keeps_snapshots=prefix_cache
            )
        self.scheduler = Scheduler(self.cache, max_num_seqs=4, max_num_batched_tokens=max_tokens)
        self.coins = CoinRule()
        if deferral:
            self.scheduler.deferral = Deferral(
                self.coins, deferral, min(9, max_tokens - 1), num_scratch
            )
        self.link: Any = None  # HeldLink, with host memory
        if num_slots and not num_states:
            self.add_host_memory(num_slots, restore)
        self.live: list[Sequence] = []
        self.known: dict[int, list[int]] = {}
        self.async_scheduling = async_scheduling
        self.in_flight: StepInFlight | None = None
        self.uncomputed = 0  # steps that are launched
        self.unread: dict[int, list[int]] = {}  # what was sampled, on the device
        self.num_added = 0
        self.added: list[tuple[Sequence, Any]] = []

    def add_host_memory(self, num_slots, restore):
        block_bytes = 8 * self.size
        tier = HostTier(num_slots * block_bytes, block_bytes)
        self.link = HeldLink()
        rule = RestoreRule(1e9, 1e6, block_bytes, self.size, mode=restore)
        bytes_of = self.memory.view(torch.uint8).view(self.memory.shape[0], -1)
        self.cache.swap = HostSwap(tier, self.link, lambda: rule, lambda i: bytes_of[i])
        self.pool.on_evict = self.cache.swap.keep

    @precondition(lambda self: len(self.live) < 8)
    @rule(
        prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=30),
        num_new=st.integers(1, 40),
        shape=st.none() | st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8)),
        penalty=st.sampled_from((0.0, 0.0, 0.0, 0.5)),
        may_stop=st.booleans(),
        turn=st.none() | st.integers(0, 20),
    )
    def add(self, prompt, num_new, shape, penalty, may_stop, turn):
        """`turn`: an earlier text, its answer included, goes on with `prompt`, as a chat does."""
        context: Context = FULL
        if turn is not None and self.added:
            seq, shape = self.added[turn % len(self.added)]
            prompt = [token for token in seq.token_ids if token != STOP] + prompt[:9]
        most = len(prompt) + num_new
        if shape is not None and not self.states:
            sinks, window, roll = shape
            context = rolling = SinkWindow(sinks, window, min(roll, window), self.size)
            most = rolling.full_tokens + self.size
        if self.cache.blocks_for(most) + 1 > self.pool.num_blocks:
            return
        seq = Sequence(
            Request(f"r{self.num_added}", tuple(prompt), SamplingParams(presence_penalty=penalty)),
            order=self.num_added,
            seed=self.num_added,
            stop_ids=frozenset({STOP} if may_stop else ()),
            max_total_tokens=len(prompt) + num_new,
            context=context,
        )
        self.num_added += 1
        self.added.append((seq, shape))
        self.live.append(seq)
        self.scheduler.add(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.scheduler.remove(seq)
        self.poison()

    @precondition(lambda self: self.live or self.in_flight)
    @rule(
        coins=st.lists(st.booleans(), min_size=1, max_size=4),
        times=st.integers(1, 25),
        arrivals=st.integers(0, 2),
        borrows=st.integers(0, 12),
    )
    def step(self, coins, times, arrivals, borrows):
        self.coins.coins = coins
        for _ in range(times):
            plan = self.scheduler.schedule()
            before, self.in_flight = self.in_flight, None
            if not plan.chunks:
                if before is not None:
                    self.land(before)
                elif self.live:
                    assert self.link is not None, "there is work, and nothing is done"
                    assert not all(t.is_done for t in self.link.transfers), "no transfer is awaited"
                    self.link.arrive(len(self.link.transfers))
                continue
            launched = self.launch(plan, borrows)
            if before is not None:
                self.land(before)
            if self.async_scheduling and self.scheduler.may_run_ahead():
                self.in_flight = launched
            else:
                self.land(launched)
            if self.link is not None:
                self.compute(launched)  # the link waits for what was launched
                self.link.arrive(arrivals)

    def launch(self, plan, borrows):
        """As the engine does; the device computes it later."""
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        # The step's activations overwrite the free tail, cached blocks there included.
        first = self.pool.lend(self.pool.num_lendable(borrows))
        self.check()
        self.pool.give_back()
        rows = []
        for chunk in plan.chunks:
            seq = chunk.seq
            assert not (seq.needs_ids and seq.num_unread_tokens), "the host has yet to read"
            assert not (chunk.length > 1 and seq.num_unread_tokens), "only decode rows are fed"
            table = [*seq.block_table, *chunk.scratch]
            rows.append(Row(chunk, table, seq.num_rolled_blocks, [*self.digests(seq)],
                            chunk.samples))  # fmt: skip
            if chunk.samples:
                self.unread.setdefault(seq.order, []).append(self.next_token(seq))
            seq.mark_launched(chunk.length, chunk.num_deferred, chunk.samples)
            if self.cache.states is not None:
                self.cache.states.mark_launched(seq)
        self.uncomputed += 1
        return StepInFlight(rows, first)

    def tokens(self, seq):
        return [*seq.token_ids, *self.unread.get(seq.order, ())]

    def next_token(self, seq):
        drawn = digest(self.tokens(seq))
        return STOP if drawn % 23 == 0 else drawn % ALPHABET

    def compute(self, launched):
        """All K and V are written, then all rows look at what they see."""
        if launched.is_computed:
            return
        launched.is_computed = True
        self.uncomputed -= 1
        self.memory[launched.first_lent : self.pool.num_blocks] = POISON
        self.memory[self.pool.num_blocks :] = POISON  # scratch lasts for one step
        written = set()
        for row in launched.rows:
            for p in range(row.chunk.start, row.chunk.start + row.chunk.length):
                block, offset = self.place(row, p)
                assert (block, offset) not in written, "two rows write to one slot"
                written.add((block, offset))
                self.memory[block, offset] = row.digests[p]
        memory = self.memory.tolist()
        for row in launched.rows:
            for t in range(row.chunk.start, row.chunk.start + row.chunk.length):
                ends, starts, _ = row.chunk.seq.context.rows(torch.tensor([t]).numpy())
                for p in range(t + 1):
                    if p < ends[0] or p >= starts[0]:
                        block, offset = self.place(row, p)
                        assert memory[block][offset] == row.digests[p], f"row {t} misses key {p}"
        if self.states:
            self.move_states(launched.rows)

    def move_states(self, rows):
        """All states are read before one is written: no slot may be both."""
        for row in rows:
            start, source = row.chunk.start, row.chunk.moves.source
            assert (source == NO_STATE) == (start == 0), "a sequence begins without its state"
            if start:
                assert self.states[source] == row.digests[start - 1], "it is another state"
        slots = [slot for row in rows for _, slot in row.chunk.moves.writes]
        assert len(set(slots)) == len(slots), "two states go to one slot"
        assert not {*slots} & {row.chunk.moves.source for row in rows}, "a slot is read, too"
        for row in rows:
            for after, slot in row.chunk.moves.writes:
                self.states[slot] = row.digests[row.chunk.start + after - 1]

    def digests(self, seq):
        """Of the tokens of `seq` up to each of them."""
        known, tokens = self.known.setdefault(seq.order, []), self.tokens(seq)
        most = seq.context.full_tokens
        while len(known) < len(tokens):
            policy = b"" if most is None or len(known) < most else seq.context.name
            known.append(digest(tokens[: len(known) + 1], policy))
        return known

    def place(self, row, position):
        page = position // self.size
        if page >= row.chunk.seq.context.num_sink_blocks:
            page -= row.num_rolled
        assert 0 <= page < len(row.table), f"position {position} is in no block"
        return row.table[page], position % self.size

    def land(self, launched):
        """As the engine does."""
        self.compute(launched)
        for row in launched.rows:
            chunk, seq = row.chunk, row.chunk.seq
            self.scheduler.mark_read(seq)
            if seq not in self.live:
                continue
            self.cache.commit(seq, chunk.start + chunk.length - chunk.num_deferred)
            if row.samples:
                delta = seq.append(self.unread[seq.order].pop(0))
                if delta.finish_reason is not None:
                    self.live.remove(seq)
                    self.scheduler.remove(seq)
        self.poison()

    def poison(self):
        for block_id in self.pool._free:
            self.memory[block_id] = POISON
        # A step that is launched still reads slots that are free for those after it.
        if self.cache.states is not None and not self.uncomputed:
            for slot in self.cache.states.pool._free:
                self.states[slot] = POISON

    def check(self):
        self.pool.check([seq.block_table for seq in (*self.live, *self.scheduler.leaving)])

    @invariant()
    def ledger(self):
        if not hasattr(self, "pool"):
            return
        self.check()
        assert self.in_flight is not None or not self.scheduler.leaving
        for seq in self.live:
            held = len(seq.block_table) + seq.num_rolled_blocks
            assert held * self.size >= seq.num_computed_tokens
            if seq.context.full_tokens is not None and seq in self.scheduler.running:
                most = seq.context.full_tokens + self.scheduler.max_num_batched_tokens
                assert len(seq.block_table) <= self.cache.blocks_for(most) + 2
        if self.cache.swap is not None:
            self.cache.swap.tier.check()
        if self.cache.states is not None:
            self.cache.states.check([*self.scheduler.running, *self.scheduler.leaving])


# About 24,000 steps of the scheduler.
TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=80,
    stateful_step_count=120,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
