"""The recurrent states of sequences, for models with linear attention: which slot a step reads and
which it writes, and snapshots of prefixes, without which KV blocks of a prefix are of no use.

Works on slots, positions and the keys of the prefix cache; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.workers.errors import InvariantError
from penstock.workers.memory.state_slots import StatePool
from penstock.workers.scheduling.plan import NO_STATE, Chunk, Plan, StateMoves
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.stats import StateStats


@dataclass(slots=True)
class _Snapshot:
    """A state that gets the key of its prefix once the host has read the tokens."""

    num_tokens: int
    slot: int  # of which it is a user
    replaces: bool  # the last one that the sequence left on its way


@dataclass(slots=True)
class SequenceStates:
    """The slots of one admitted sequence."""

    slot: int = NO_STATE  # the state after its computed tokens
    moves: StateMoves | None = None  # of the step that is being prepared
    pending: list[_Snapshot] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)  # lengths of prefixes to keep the state of
    newest: bytes | None = None  # the last snapshot left on the way


class StateCache:
    """Gives sequences their slots.

    A running sequence has a slot, and a step needs another one for each of its sequences: so two
    are set aside for each. The others hold snapshots: at the last whole block of a prompt, where
    two prompts were seen to part, and of each sequence the newest at the end of a block. Without
    `keeps_snapshots`, every prompt is computed from its first token.
    """

    def __init__(
        self, pool: StatePool, block_size: int, *, keeps_snapshots: bool, slot_bytes: int = 0
    ):
        self.pool = pool
        self._slot_bytes = slot_bytes
        self.block_size = block_size
        self.keeps_snapshots = keeps_snapshots
        self._of: dict[Sequence, SequenceStates] = {}
        self._num_pending = 0

    @property
    def has_room(self) -> bool:
        """Whether one more sequence can be admitted."""
        return 2 * (len(self._of) + 1) + self._num_pending <= self.pool.num_slots

    def stats(self) -> StateStats:
        pool = self.pool
        return StateStats(
            num_slots=pool.num_slots,
            slot_bytes=self._slot_bytes,
            num_live=pool.num_slots - pool.num_available,
            num_snapshots=pool.num_snapshots,
            num_evicted=pool.num_evicted,
        )

    def num_reusable(self, keys: list[bytes]) -> int:
        """How many of the leading blocks with these keys can be used: up to the last snapshot."""
        for num in range(len(keys), 0, -1):
            if self.pool.find(keys[num - 1]) is not None:
                return num
        return 0

    def admit(self, seq: Sequence, keys: list[bytes], num_shared: int) -> None:
        """`seq` begins after the blocks with `keys`, whose snapshot there is. `num_shared` of its
        leading blocks are those of another sequence."""
        states = self._of[seq] = SequenceStates()
        if keys:
            slot = self.pool.find(keys[-1])
            if slot is None:
                raise InvariantError("the snapshot of a prefix is gone")
            self.pool.retain(slot)
            states.slot = slot
        if self.keeps_snapshots:
            last_block = (seq.num_tokens - 1) // self.block_size
            ends = {num_shared * self.block_size, last_block * self.block_size}
            states.wanted = {end for end in ends if end > len(keys) * self.block_size}

    def assign(self, plan: Plan) -> None:
        """Give each chunk of `plan` the slots that it reads and writes."""
        for chunks in (plan.decode, plan.prefill):
            for i, chunk in enumerate(chunks):
                moves = self._moves_of(chunk)
                self._of[chunk.seq].moves = moves
                chunks[i] = replace(chunk, moves=moves)

    def _moves_of(self, chunk: Chunk) -> StateMoves:
        states, size = self._of[chunk.seq], self.block_size
        stored = chunk.length - chunk.num_deferred
        if not stored:  # all is computed once more in the next step
            return StateMoves(states.slot, (), states.slot)
        end, writes = chunk.start + stored, []
        for position in sorted(each for each in states.wanted if chunk.start < each < end):
            if self._may_keep():
                slot = self.pool.allocate()
                self._keep(states, _Snapshot(position, slot, replaces=False))
                writes.append((position - chunk.start, slot))
        target = self.pool.allocate()
        if self.keeps_snapshots and end % size == 0 and self._may_keep():
            self.pool.retain(target)
            self._keep(states, _Snapshot(end, target, replaces=end not in states.wanted))
        writes.append((stored, target))
        return StateMoves(states.slot, tuple(writes), target)

    def _may_keep(self) -> bool:
        """Whether a slot can be spared for a snapshot that has no key yet."""
        return 2 * len(self._of) + self._num_pending < self.pool.num_slots

    def _keep(self, states: SequenceStates, snapshot: _Snapshot) -> None:
        states.pending.append(snapshot)
        self._num_pending += 1

    def mark_launched(self, seq: Sequence) -> None:
        """The step of the chunk that `assign` saw last was launched: it will not run again."""
        states = self._of[seq]
        moves, states.moves = states.moves, None
        if moves is None:
            raise InvariantError("a chunk was launched without its slots")
        if moves.target != states.slot:
            self._release(states.slot)
            states.slot = moves.target

    def commit(self, seq: Sequence, num_computed: int) -> None:
        """The first `num_computed` tokens of `seq` are known, and the keys of their blocks."""
        states = self._of[seq]
        while states.pending and states.pending[0].num_tokens <= num_computed:
            snapshot = states.pending.pop(0)
            self._num_pending -= 1
            states.wanted.discard(snapshot.num_tokens)
            key = seq.block_keys[snapshot.num_tokens // self.block_size - 1]
            if self.pool.name(snapshot.slot, key) and snapshot.replaces:
                if states.newest is not None:
                    self.pool.forget(states.newest)
                states.newest = key
            self.pool.release(snapshot.slot)

    def release(self, seq: Sequence) -> None:
        """`seq` has ended, or is preempted."""
        states = self._of.pop(seq, None)
        if states is None:
            return
        if states.moves is not None and states.moves.target != states.slot:
            self._release(states.moves.target)
        for snapshot in states.pending:
            self.pool.release(snapshot.slot)
        self._num_pending -= len(states.pending)
        self._release(states.slot)

    def forget(self, seq: Sequence) -> None:
        """Snapshots of `seq` may be wrong: its logits were not finite."""
        for key in seq.block_keys:
            self.pool.forget(key)

    def _release(self, slot: int) -> None:
        if slot != NO_STATE:
            self.pool.release(slot)

    def check(self, admitted: Iterable[Sequence]) -> None:
        """Assert that exactly these sequences have slots, and that no slot is lost."""
        assert set(self._of) == set(admitted), "slots of a sequence that is not admitted"
        users = [states.slot for states in self._of.values() if states.slot != NO_STATE]
        users += [each.slot for states in self._of.values() for each in states.pending]
        assert not any(states.moves for states in self._of.values()), "a step without an end"
        assert self._num_pending == sum(len(states.pending) for states in self._of.values())
        self.pool.check(users)
