"""The host tier's accounts and contents against a simple model, and the copy thread."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.memory.copier import CopyThread, Throttle, Transfer
from penstock.workers.memory.host_tier import HostTier

BLOCK_BYTES = 24


def block_of(number, size=BLOCK_BYTES):
    return torch.full((size,), number % 251, dtype=torch.uint8)


def tier_of(num_slots, size=BLOCK_BYTES):
    tier = HostTier(num_slots * size + size // 2, size)
    assert tier.num_slots == num_slots
    tier.storage.fill_(255)  # whatever fresh memory holds
    return tier


def chain_of(*numbers):
    """Content keys of a chain; the tokens of block i are numbers[: i + 1]."""
    chain, parent = [], b"root"
    for i in range(len(numbers)):
        key = bytes(numbers[: i + 1])
        chain.append((key, parent, bytes(numbers[i : i + 1])))
        parent = key
    return chain


def held_bytes(tier, held):
    out = [torch.zeros(tier.block_bytes, dtype=torch.uint8) for _ in held.slots]
    tier.load(held.slots, out)
    return [block.tolist() for block in out]


def test_blocks_of_an_arena_come_back_bit_for_bit():
    """Through host memory and into other blocks; NaN and all."""
    layout = BlockLayout(2, 2, 4, 8, torch.float32)
    arena = Arena(layout, 6, torch.device("cpu"))
    arena.storage.view(torch.float32).fill_(float("nan"))
    arena.storage.random_(0, 256)
    tier = HostTier(3 * layout.block_bytes, layout.block_bytes)
    before = arena.storage.clone()
    assert tier.put_private("s", [arena.block(i) for i in (4, 0, 2)])
    arena.block(4).fill_(0)
    held = tier.hold_private("s")
    assert held is not None
    tier.load(held.slots, [arena.block(i) for i in (1, 3, 5)])
    tier.release(held)
    old = before.view(6, -1)
    for source, target in ((4, 1), (0, 3), (2, 5)):
        assert torch.equal(arena.block(target), old[source])
    assert tier.discard("s") and not tier.discard("s")
    tier.check()
    assert tier.stats().num_used == 0
    assert tier.stats().bytes_in == tier.stats().bytes_out == 3 * layout.block_bytes


def test_a_hit_compares_parent_and_tokens():
    tier = tier_of(4)
    (key, parent, token_ids), deeper = chain_of(1, 2)
    assert tier.put(key, parent, token_ids, block_of(1))
    assert tier.put(*deeper, block_of(2))
    assert tier.match(chain_of(1, 2, 3)) == 2
    for forged in ((key, parent, b"other"), (key, b"other", token_ids)):
        assert tier.match([forged, deeper]) == 0
        assert tier.hold([forged, deeper]).slots == ()
        assert not tier.put(*forged, block_of(9))
    held = tier.hold(chain_of(1, 2, 3))
    assert held_bytes(tier, held) == [block_of(1).tolist(), block_of(2).tolist()]
    stats = tier.stats()
    assert (stats.num_hit_blocks, stats.num_missed_blocks) == (2, 5)


def test_a_chain_is_evicted_from_its_end():
    tier = tier_of(3)
    for each in chain_of(1, 2, 3):
        assert tier.put(*each, block_of(0))
    tier.release(tier.hold(chain_of(1, 2, 3)))
    assert tier.put(*chain_of(7)[0], block_of(7))
    assert tier.match(chain_of(1, 2, 3)) == 2
    assert tier.put(*chain_of(8)[0], block_of(8))
    assert tier.match(chain_of(1, 2, 3)) == 1
    tier.match(chain_of(7))  # a look is no use
    assert tier.put_private("s", [block_of(9), block_of(10)])
    assert tier.match(chain_of(7)) == 0 and tier.stats().num_evicted_blocks == 4


def test_a_sequence_goes_as_a_whole_and_all_or_nothing():
    tier = tier_of(4)
    assert tier.put_private("a", [block_of(i) for i in range(3)])
    assert not tier.put_private("b", [block_of(i) for i in range(5)])  # more than there is
    assert "a" in tier and tier.stats().num_evicted_blocks == 0
    held = tier.hold_private("a")
    assert not tier.put_private("b", [block_of(i) for i in range(2)])
    tier.check()
    assert tier.put(*chain_of(1)[0], block_of(1))
    assert not tier.put_private("b", [block_of(i) for i in range(2)])
    assert tier.match(chain_of(1)) == 1  # nothing was evicted in vain
    assert tier.stats().num_refused_blocks == 5 + 2 + 2
    tier.release(held)
    assert tier.put_private("b", [block_of(i) for i in range(2)])
    assert "a" not in tier and tier.hold_private("a") is None
    tier.check()


def test_the_oldest_entry_that_is_not_held_is_evicted():
    tier = tier_of(3)
    oldest, middle, newest = (chain_of(i)[0] for i in (1, 2, 3))
    for each in (oldest, middle, newest):
        assert tier.put(*each, block_of(1))
    held = tier.hold([oldest])
    assert (
        tier.match([middle]) and tier.put(*middle, block_of(1)) and tier.put(*newest, block_of(1))
    )
    assert next(iter(tier._entries)) == oldest[0]  # oldest, but held
    assert tier.put(*chain_of(4)[0], block_of(4))
    assert tier.match([oldest]) and not tier.match([middle])
    assert held_bytes(tier, held) == [block_of(1).tolist()]
    tier.check()


def test_discarded_while_held():
    tier = tier_of(2)
    assert tier.put_private("a", [block_of(1), block_of(2)])
    first, second = tier.hold_private("a"), tier.hold_private("a")
    assert tier.discard("a") and "a" not in tier
    assert not tier.put_private("a", [block_of(3)])
    tier.release(first)
    assert held_bytes(tier, second) == [block_of(1).tolist(), block_of(2).tolist()]
    tier.check()
    tier.release(second)
    assert tier.put_private("a", [block_of(3)])
    with pytest.raises(InvariantError, match="released twice"):
        tier.release(second)
    with pytest.raises(InvariantError, match="is not held"):
        tier.load([0], [block_of(0)])


@pytest.mark.parametrize(
    "bad", [torch.zeros(BLOCK_BYTES), torch.zeros(BLOCK_BYTES + 1, dtype=torch.uint8)]
)
def test_a_bad_block_changes_nothing(bad):
    tier = tier_of(2)
    assert tier.put_private("a", [block_of(1), block_of(2)])
    for put in (
        lambda: tier.put(b"k", b"p", b"t", bad),
        lambda: tier.put_private("b", [block_of(1), bad]),
        lambda: tier.load(tier.hold_private("a").slots, [block_of(0), bad]),
    ):
        with pytest.raises(ValueError, match=r"a block is uint8 \[24\]"):
            put()
        tier.check()
    assert "a" in tier


def test_a_copy_that_fails_loses_no_slot():
    tier = tier_of(3)
    unreadable = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="meta")
    for _ in range(4):
        with pytest.raises(NotImplementedError):
            tier.put_private("a", [block_of(1), unreadable])
        with pytest.raises(NotImplementedError):
            tier.put(b"k", b"p", b"t", unreadable)
        tier.check()
    assert tier.stats().num_used == 0 and tier.stats().bytes_in == 0
    assert tier.put_private("a", [block_of(i) for i in range(3)])


def test_too_little_memory():
    with pytest.raises(ConfigError, match="host_kv_gb: 511 bytes hold no block of 512"):
        HostTier(511, 512)
    with pytest.raises(ConfigError, match="cannot be had; give less"):
        HostTier(2**60, 512)


class TierOracle:
    """Host memory as a list: oldest use first. Evicts like the tier should, in other words."""

    def __init__(self, num_slots):
        self.num_slots, self.entries, self.gone = num_slots, [], []

    def used(self):
        return sum(len(e["blocks"]) for e in self.entries + self.gone)

    def find(self, name):
        return next((e for e in self.entries if e["name"] == name), None)

    def touch(self, entry):
        self.entries.remove(entry)
        self.entries.append(entry)

    def put(self, name, content, blocks):
        held = sum(len(e["blocks"]) for e in self.entries + self.gone if e["holds"])
        if held + len(blocks) > self.num_slots:
            return False
        while self.used() + len(blocks) > self.num_slots:
            self.entries.remove(next(e for e in self.entries if not e["holds"]))
        self.entries.append({"name": name, "content": content, "blocks": blocks, "holds": 0})
        return True


class TierMachine(RuleBasedStateMachine):
    """Random puts, holds, loads, discards, releases and failures, with a concurrent link."""

    num_slots = 6

    def __init__(self):
        super().__init__()
        self.tier = tier_of(self.num_slots)
        self.model = TierOracle(self.num_slots)
        self.link = CopyThread()
        self.holds = []
        self.payload = 0

    def teardown(self):
        self.link.close()

    def new_blocks(self, count):
        self.payload += count
        return list(range(self.payload - count, self.payload))

    @rule(
        numbers=st.lists(st.integers(0, 2), min_size=1, max_size=2),
        forged=st.sampled_from([False, False, False, True]),
    )
    def put(self, numbers, forged):
        key, parent, token_ids = chain_of(*numbers)[-1]
        if forged:
            token_ids = b"forged"
        blocks = self.new_blocks(1)
        there = self.model.find(key)
        if there is None:
            expected = self.model.put(key, (parent, token_ids), blocks)
        else:
            expected = there["content"] == (parent, token_ids)
            if expected:
                self.model.touch(there)
        assert self.tier.put(key, parent, token_ids, block_of(blocks[0])) == expected

    @rule(owner=st.sampled_from("abc"), count=st.integers(0, 7))
    def put_private(self, owner, count):
        if self.model.find(owner):
            return
        blocks = self.new_blocks(count)
        expected = self.model.put(owner, None, blocks)
        assert self.tier.put_private(owner, [block_of(b) for b in blocks]) == expected

    @rule(count=st.integers(1, 3))
    def put_fails(self, count):
        """Room is made, then the copy fails: what was evicted is lost, but no slot is."""
        bad = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="meta")
        blocks = [block_of(0)] * (count - 1) + [bad]
        if self.model.put("failing", None, blocks):
            self.model.entries.pop()
            with pytest.raises(NotImplementedError):
                self.tier.put_private("failing", blocks)
        else:
            assert not self.tier.put_private("failing", blocks)

    @rule(numbers=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def hold(self, numbers):
        chain, found = chain_of(*numbers), []
        for key, parent, token_ids in chain:
            entry = self.model.find(key)
            if entry is None or entry["content"] != (parent, token_ids):
                break
            found.append(entry)
        assert self.tier.match(chain) == len(found)
        for entry in reversed(found):
            self.model.touch(entry)
        self.add_hold(self.tier.hold(chain), found)

    @rule(owner=st.sampled_from("abc"))
    def hold_private(self, owner):
        entry = self.model.find(owner)
        held = self.tier.hold_private(owner)
        assert (held is None) == (entry is None)
        if held is not None:
            self.model.touch(entry)
            self.add_hold(held, [entry])

    def add_hold(self, held, entries):
        for entry in entries:
            entry["holds"] += 1
        out = [torch.full((BLOCK_BYTES,), 255, dtype=torch.uint8) for _ in held.slots]
        transfer = self.tier.load(held.slots, out, self.link)
        self.holds.append((held, entries, transfer, out))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data):
        held, entries, transfer, out = self.holds.pop(
            data.draw(st.integers(0, len(self.holds) - 1))
        )
        expected = [block_of(b).tolist() for e in entries for b in e["blocks"]]
        assert transfer.wait(60) and transfer.is_complete and transfer.error is None
        assert [block.tolist() for block in out] == expected
        assert held_bytes(self.tier, held) == expected
        self.tier.release(held)
        for entry in entries:
            entry["holds"] -= 1
        self.model.gone = [e for e in self.model.gone if e["holds"]]

    @rule(name=st.sampled_from(["a", "b", "c", bytes([0]), bytes([1, 0])]))
    def discard(self, name):
        entry = self.model.find(name)
        assert self.tier.discard(name) == (entry is not None)
        if entry is not None:
            self.model.entries.remove(entry)
            if entry["holds"]:
                self.model.gone.append(entry)

    @invariant()
    def same(self):
        self.tier.check()
        assert list(self.tier._entries) == [e["name"] for e in self.model.entries]
        assert self.tier.stats().num_used == self.model.used()
        for entry in self.model.entries:
            slots = self.tier._entries[entry["name"]].slots
            assert self.tier.storage[slots, 0].tolist() == [b % 251 for b in entry["blocks"]]


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- the link


def test_the_throttle_is_a_link_of_that_speed():
    now = [100.0]
    throttle = Throttle(50.0, clock=lambda: now[0])
    assert throttle.delay_s(100) == pytest.approx(2.0)
    assert throttle.delay_s(50) == pytest.approx(3.0)  # after the first
    now[0] = 102.5
    assert throttle.delay_s(25) == pytest.approx(1.0)
    now[0] = 200.0  # long idle: nothing saved up
    assert throttle.delay_s(25) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="bytes_per_s must be positive"):
        Throttle(0)


def test_a_throttled_link_copies_and_measures_itself():
    pairs = [(block_of(i, 1000), block_of(0, 1000)) for i in range(1, 6)]
    with CopyThread(bytes_per_s=100_000.0) as link:
        assert link.bytes_per_s() is None
        transfer = link.submit(pairs)
        assert transfer.wait(60) and transfer.is_complete and transfer.num_done == 5
        rate = link.bytes_per_s()
        assert rate is not None and 0 < rate <= 100_000.0  # never faster than configured
    assert all(torch.equal(source, out) for source, out in pairs)
    assert link.num_bytes == 5000


def test_cancelled_transfers_leave_the_rest_alone():
    pairs = [(block_of(1), block_of(0)) for _ in range(3)]
    with CopyThread(bytes_per_s=1e-3) as link:
        first, second = link.submit(pairs), link.submit(pairs)
        assert not first.wait(0.01) and not first.is_done
        second.cancel()
        first.cancel()
        assert first.wait(60) and second.wait(60)
        assert not first.is_complete and first.num_done == second.num_done == 0
        assert first.error is None
        assert all(out.sum() == 0 for _, out in pairs)


def test_closing_ends_what_is_under_way():
    before = set(threading.enumerate())  # other tests of this process may have left some
    link = CopyThread(bytes_per_s=1e-3)
    transfers = [link.submit([(block_of(1), block_of(0))]) for _ in range(3)]
    link.close()
    assert all(t.is_done and not t.is_complete for t in transfers)
    with pytest.raises(RuntimeError, match="closed"):
        link.submit([])
    link.close()  # again does no harm
    new = set(threading.enumerate()) - before
    assert not any(t.name == "penstock-copy" and t.is_alive() for t in new)


def test_whatever_was_accepted_ends_though_others_close():
    for _ in range(50):
        link = CopyThread()
        accepted: list[Transfer] = []

        def submit_until_closed(link=link, accepted=accepted):
            while True:
                try:
                    accepted.append(link.submit([(block_of(1), block_of(0))]))
                except RuntimeError:
                    return

        submitters = [threading.Thread(target=submit_until_closed) for _ in range(2)]
        for submitter in submitters:
            submitter.start()
        while len(accepted) < 3:
            pass
        link.close()
        for submitter in submitters:
            submitter.join(60)
        assert all(transfer.is_done for transfer in accepted)


def test_an_error_is_its_transfers_alone():
    good = [(block_of(1), block_of(0))]
    with CopyThread() as link:
        failed = link.submit([*good, (block_of(1), block_of(0, 7))])
        after, empty = link.submit([(block_of(2), block_of(0))]), link.submit([])
        assert failed.wait(60) and after.wait(60) and empty.wait(60)
        assert isinstance(failed.error, RuntimeError)
        assert failed.num_done == 1 and not failed.is_complete
        assert after.is_complete and after.error is None and empty.is_complete


def test_destinations_made_in_inference_mode():
    with torch.inference_mode():
        out = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    tier = tier_of(1)
    assert tier.put(b"k", b"p", b"t", block_of(5))
    held = tier.hold([(b"k", b"p", b"t")])
    with CopyThread() as link:
        transfer = tier.load(held.slots, [out], link)
        assert transfer.wait(60) and transfer.error is None
    assert out.tolist() == block_of(5).tolist()
    tier.load(held.slots, [out])
