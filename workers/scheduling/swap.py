"""KV blocks that leave the device pool and come back: from host memory, or by recomputation.

Blocks evicted from the prefix cache are kept by content; the other blocks of a preempted sequence
under the sequence's own id. On return the restore rule decides which tokens are loaded, which are
computed, and whether both happen at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.config import EngineConfig
from penstock.workers.memory.arena import Arena
from penstock.workers.memory.block_pool import ContentKey
from penstock.workers.memory.copier import CopyThread, Transfer
from penstock.workers.memory.host_tier import HeldSlots, HostMirror, HostTier
from penstock.workers.memory.restore import (
    PROBE_COPIES,
    PROBE_ROWS,
    Rates,
    RestorePlan,
    RestoreRule,
    seconds_of,
)
from penstock.workers.scheduling.sequence import Sequence

log = logging.getLogger("penstock.engine")


@dataclass(slots=True, eq=False)
class Restore:
    """A load in progress: K and V of tokens [start, end) of one sequence."""

    start: int
    end: int
    held: HeldSlots
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a sequence had when it was preempted; its blocks are in host memory."""

    num_computed_tokens: int
    num_rolled_blocks: int
    block_keys: list[bytes]


@dataclass(frozen=True, slots=True)
class GroupHost:
    """Host memory of all ranks of a group. `block_bytes`: of one block, all parts of it; `begin`
    has the other ranks take memory for a number of slots."""

    block_bytes: int
    begin: Callable[[int], HostMirror]


class HostSwap:
    """The host tier as the KV cache of one engine uses it."""

    def __init__(
        self,
        tier: HostTier,
        link: CopyThread,
        rule: Callable[[], RestoreRule],
        block: Callable[[int], Tensor],
        mirror: HostMirror | None = None,
    ):
        """`rule` gives the rates as they are known now; `block` the bytes of a device block.
        `mirror`: the other ranks of a group."""
        self.tier = tier
        self.link = link
        self._rule = rule
        self._block = block
        self._mirror = mirror
        self._swapped: dict[str, Swapped] = {}
        self._restores: dict[str, Restore] = {}
        self.num_loaded_tokens = 0
        self.num_swapped_out = 0  # sequences
        self.num_restores: dict[str, int] = {"load": 0, "recompute": 0, "split": 0}

    # -- out

    def keep(self, block_id: int, key: bytes, parent: bytes, token_ids: bytes) -> None:
        """A block is evicted from the prefix cache: keep its content in host memory."""
        if self.tier.put(key, parent, token_ids, self._block(block_id)):
            self._store_elsewhere(key, [block_id])

    def swap_out(self, seq: Sequence) -> None:
        """Copy the computed blocks of `seq` to host memory, if it has room for them."""
        if not seq.num_computed_tokens or _owner(seq) in self._restores:
            return
        self.forget(seq)
        num_blocks = -(-seq.num_computed_tokens // self._rule().block_size)
        used = seq.block_table[: num_blocks - seq.num_rolled_blocks]
        if self.tier.put_private(_owner(seq), [self._block(b) for b in used]):
            self._store_elsewhere(_owner(seq), used)
            self._swapped[_owner(seq)] = Swapped(
                seq.num_computed_tokens, seq.num_rolled_blocks, list(seq.block_keys)
            )
            self.num_swapped_out += 1

    def _store_elsewhere(self, name: bytes | str, blocks: Seq[int]) -> None:
        if self._mirror is not None:
            self._mirror.store(blocks, self.tier.slots_of(name))

    # -- in

    def swapped(self, seq: Sequence) -> Swapped | None:
        """What can be loaded for a preempted `seq`, if it is still there and worth loading."""
        found = self._swapped.get(_owner(seq))
        if found is None:
            return None
        if _owner(seq) not in self.tier:  # evicted from host memory since
            del self._swapped[_owner(seq)]
            return None
        # To recompute K and V after evicted tokens, all of these must be computed again.
        plan = self._rule().choose(found.num_computed_tokens)
        if plan.branch == "recompute":
            self.num_restores["recompute"] += 1
            self.forget(seq)
            return None
        return found

    def restore_s(self, num_tokens: int) -> float:
        """Seconds until `num_tokens` tokens of one sequence are there again, loaded or computed."""
        return self._rule().choose(num_tokens).seconds

    def hold(self, seq: Sequence) -> HeldSlots:
        """Keep what is `swapped` of `seq` from being evicted, until `swap_in`."""
        held = self.tier.hold_private(_owner(seq))
        assert held is not None, "evicted between `swapped` and `hold`"
        return held

    def swap_in(self, seq: Sequence, found: Swapped, held: HeldSlots) -> None:
        """Start to load all blocks of `seq`, which are in its block table already."""
        seq.num_rolled_blocks = found.num_rolled_blocks
        seq.block_keys = list(found.block_keys)
        blocks = seq.block_table[: len(held.slots)]
        self._begin(seq, 0, found.num_computed_tokens, held, held.slots, blocks)
        self.num_restores["load"] += 1

    def plan(self, chain: Seq[ContentKey]) -> RestorePlan | None:
        """How to restore the leading blocks of `chain`; None if host memory has none of them."""
        num_blocks = self.tier.match(chain)
        if not num_blocks:
            return None
        rule = self._rule()
        return rule.choose(num_blocks * rule.block_size)

    def load(self, seq: Sequence, chain: Seq[ContentKey], plan: RestorePlan, start: int) -> None:
        """Start to load what `plan` says of `chain`, which begins at token `start` of `seq`."""
        self.num_restores[plan.branch] += 1
        if not plan.num_loaded:
            return
        size = self._rule().block_size
        first, count = plan.num_computed // size, plan.num_loaded // size
        held = self.tier.hold(chain[: first + count])
        begin = start + plan.num_computed
        blocks = seq.block_table[begin // size : begin // size + count]
        slots = held.slots[first : first + count]
        self._begin(seq, begin, begin + count * size, held, slots, blocks)

    def _begin(
        self,
        seq: Sequence,
        start: int,
        end: int,
        held: HeldSlots,
        slots: Seq[int],
        blocks: Seq[int],
    ) -> None:
        transfer = self.tier.load(slots, [self._block(b) for b in blocks], self.link)
        assert transfer is not None
        if self._mirror is not None:
            self._mirror.load(slots, blocks)
        self._restores[_owner(seq)] = Restore(start, end, held, transfer)

    # -- while a load is in progress

    def limit(self, seq: Sequence) -> int | None:
        """The first token of `seq` that is being loaded, and so is not computed; None: no load."""
        restore = self._restores.get(_owner(seq))
        return None if restore is None else restore.start

    def wait(self, timeout_s: float) -> bool:
        """Wait until a load is done, at most `timeout_s`; False if there is none."""
        for restore in self._restores.values():
            restore.transfer.wait(timeout_s)
            return True
        return False

    def advance(self, seq: Sequence) -> None:
        """If the load of `seq` is done and all tokens before it are computed, continue after it."""
        restore = self._restores.get(_owner(seq))
        if restore is None or seq.num_computed_tokens != restore.start:
            return
        if not restore.transfer.is_done:
            return
        self.tier.release(restore.held)
        del self._restores[_owner(seq)]
        if restore.transfer.is_complete:
            seq.num_computed_tokens = restore.end
            self.num_loaded_tokens += restore.end - restore.start
            self._swapped.pop(_owner(seq), None)
            self.tier.discard(_owner(seq))
        # Else its tokens are computed like any others.

    def stop(self, seq: Sequence) -> None:
        """`seq` frees its blocks: no load may write to them any more."""
        restore = self._restores.pop(_owner(seq), None)
        if restore is not None:
            restore.transfer.cancel()
            restore.transfer.wait()
            self.tier.release(restore.held)

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended: drop what host memory has of it."""
        if self._swapped.pop(_owner(seq), None) is not None:
            self.tier.discard(_owner(seq))

    def close(self) -> None:
        """End the copier; loads in progress are dropped."""
        self.link.close()


def host_swap(
    config: EngineConfig,
    arena: Arena,
    run_rows: Callable[[int], None],
    most_rows: int,
    group: GroupHost | None = None,
) -> tuple[HostSwap, Rates]:
    """As configured, with rates that are measured now: `run_rows` computes up to `most_rows`.
    `group`: of the group whose first rank this is."""
    assert config.host_kv_gb
    block_bytes, device = arena.layout.block_bytes, arena.storage.device
    is_cuda = device.type == "cuda"
    capacity, mirror = int(config.host_kv_gb * 2**30), None
    if group is not None:  # a slot holds a block's parts on all ranks
        capacity = capacity // group.block_bytes * block_bytes
    tier = HostTier(capacity, block_bytes, pin=is_cuda)
    if group is not None:
        mirror = group.begin(tier.num_slots)
    sample = torch.zeros_like(arena.block(0), device="cpu")
    num_rows = min(PROBE_ROWS, most_rows)
    rates = Rates(
        num_rows / seconds_of(lambda: run_rows(num_rows)),
        block_bytes / seconds_of(lambda: arena.block(0).copy_(sample), PROBE_COPIES),
    )
    link = CopyThread(device=device)

    def rule() -> RestoreRule:
        rates.observe_link(link.bytes_per_s())
        return RestoreRule(
            rates.link_bytes_per_s,
            rates.compute_tokens_per_s,
            block_bytes,
            config.block_size,
            mode=config.kv_restore,
            min_tokens=config.kv_restore_min_tokens,
        )

    log.info("host memory for KV: %d blocks; %s", tier.num_slots, rule().choose(1024))
    return HostSwap(tier, link, rule, arena.block, mirror), rates


def _owner(seq: Sequence) -> str:
    return str(seq.order)  # unique in one engine, also where a request id is used twice
