"""Connections: how many there may be, of one address too, and who makes room."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.deployments.ingress.core.bounds.connections import Connections, connections_for

MOST, MOST_PER_ADDRESS = 6, 4
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class Machine(RuleBasedStateMachine):
    """Beside a plain list of what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Connections(MOST, MOST_PER_ADDRESS)
        self.open: dict[int, str] = {}
        self.idle: list[int] = []
        self.num = 0

    def evict(self, key: int) -> None:
        assert key in self.idle
        self.idle.remove(key)
        del self.open[key]

    @rule(address=st.sampled_from(ADDRESSES))
    def come(self, address: str) -> None:
        self.num += 1
        key = self.num
        of_address = [each for each in self.open if self.open[each] == address]
        if len(of_address) >= MOST_PER_ADDRESS:
            expected = [each for each in self.idle if each in of_address]
            fits = bool(expected)
        else:
            expected = self.idle if len(self.open) >= MOST else []
            fits = len(self.open) < MOST or bool(expected)
        victim = expected[0] if expected else None
        assert self.counted.enter(key, address, lambda: self.evict(key)) == fits
        assert victim not in self.open
        if fits:
            self.open[key] = address
            self.idle.append(key)

    @rule(data=st.data())
    def become_busy(self, data: st.DataObject) -> None:
        if self.idle:
            key = data.draw(st.sampled_from(self.idle))
            self.counted.busy(key)
            self.idle.remove(key)

    @rule(data=st.data())
    def become_idle(self, data: st.DataObject) -> None:
        if busy := sorted(self.open.keys() - set(self.idle)):
            key = data.draw(st.sampled_from(busy))
            self.counted.idle(key, lambda: self.evict(key))
            self.idle.append(key)

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        key = data.draw(st.integers(1, max(1, self.num)))  # also one that has gone
        self.counted.leave(key)
        self.open.pop(key, None)
        if key in self.idle:
            self.idle.remove(key)

    @invariant()
    def counts_agree(self) -> None:
        assert self.counted.num == len(self.open) <= MOST
        assert max(Counter(self.open.values()).values(), default=0) <= MOST_PER_ADDRESS


TestMachine = Machine.TestCase


@given(st.integers(0, 2**64 - 1))
def test_an_ipv6_client_counts_as_its_network(suffix: int) -> None:
    counted = Connections(8, 2)
    for number in range(2):
        address = f"2001:db8:1:2:{number:x}:{suffix >> 48:x}:0:1"
        assert counted.enter(number, address, lambda: None)
        counted.busy(number)
    assert not counted.enter(3, "2001:db8:1:2::9", lambda: None)
    assert counted.enter(4, "2001:db8:1:3::9", lambda: None)
    assert counted.enter(5, "::ffff:10.0.0.1", lambda: None)
    assert counted.enter(6, "not an address", lambda: None)


def test_the_number_follows_the_limit_of_open_files() -> None:
    assert connections_for(100, None).most == 100
    assert connections_for(None, None).most_per_address == connections_for(None, None).most // 2
    assert connections_for(100, 7).most_per_address == 7
