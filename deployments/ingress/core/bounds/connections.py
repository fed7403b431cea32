"""How many connections an ingress holds, in all and of one address, and which of them are idle.

At the limit, the connection that has been idle for longest is closed for a new one: a client that
keeps thousands of idle connections open loses those, and other clients can still connect.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable

# Left to everything but client connections: workers, the gate, the state store, files, libraries.
RESERVED_DESCRIPTORS = 256
MAX_CONNECTIONS = 65_536
IPV6_SITE_BITS = 64  # an IPv6 host can use every address of its /64 network: the network is counted

_Idle = OrderedDict[object, Callable[[], None]]  # longest idle first


class Connections:
    """The open connections. Lives on one event loop.

    A connection is idle while no request of it is being answered: before the head of a request is
    complete, and between requests.
    """

    def __init__(self, most: int, most_per_address: int | None = None):
        """`most_per_address`: None: half of `most`, so that no address has all."""
        self.most = most
        self.most_per_address = most_per_address or max(1, most // 2)
        self.num_refused = 0
        self.num_evicted = 0  # idle ones, for the room that they took
        self._addresses: dict[object, str] = {}
        self._num_of: Counter[str] = Counter()
        self._idle: _Idle = OrderedDict()
        self._idle_of: dict[str, _Idle] = {}

    @property
    def num(self) -> int:
        return len(self._addresses)

    def enter(self, key: object, address: str, evict: Callable[[], None]) -> bool:
        """Count a new connection, which is idle; False: there is no room, and it must be closed.

        `evict`: closes it; called while it is idle and a newer one needs its place.
        """
        site = _site(address)
        if self._num_of[site] >= self.most_per_address:
            has_room = self._evict_one(self._idle_of.get(site))
        else:
            has_room = self.num < self.most or self._evict_one(self._idle)
        if not has_room:
            self.num_refused += 1
            return False
        self._addresses[key] = site
        self._num_of[site] += 1
        self.idle(key, evict)
        return True

    def busy(self, key: object) -> None:
        """A request of it is being answered."""
        if self._idle.pop(key, None) is not None:
            idle = self._idle_of[self._addresses[key]]
            del idle[key]
            if not idle:
                del self._idle_of[self._addresses[key]]

    def idle(self, key: object, evict: Callable[[], None]) -> None:
        """Its request has been answered."""
        site = self._addresses.get(key)
        if site is not None:
            self._idle[key] = evict
            self._idle_of.setdefault(site, OrderedDict())[key] = evict

    def leave(self, key: object) -> None:
        """It has ended; also if it was refused, or has left before."""
        self.busy(key)
        site = self._addresses.pop(key, None)
        if site is not None:
            self._num_of[site] -= 1
            if not self._num_of[site]:
                del self._num_of[site]

    def _evict_one(self, idle: _Idle | None) -> bool:
        """Close the first of these, if there is one."""
        if not idle:
            return False
        key, evict = next(iter(idle.items()))
        self.num_evicted += 1
        self.leave(key)  # its place is free at once, though its socket closes a little later
        evict()
        return True


def _site(address: str) -> str:
    """What is counted as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, IPV6_SITE_BITS), strict=False).network_address)


def descriptor_limit() -> int:
    """The limit of open files, raised as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a container may forbid it
            hard = soft
    return MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else hard


def connections_for(most: int | None, most_per_address: int | None) -> Connections:
    """`most`: None: as many as the limit of open files leaves room for."""
    room = descriptor_limit() - RESERVED_DESCRIPTORS
    return Connections(max(8, min(most or MAX_CONNECTIONS, room)), most_per_address)
