"""The waiting requests and their order: priority, fair share, deadline, predicted size.

1. Class: the priority. A request that has waited longer than `max_wait_s` is in the highest class
   that waits, so that none starves; not above it, or one tenant's burst would go before all others.
   Requests of LOWEST_PRIORITY, as those of batches, stay in theirs: they wait for as long as others
   do, and a batch whose time is at risk sends them at another priority.
2. Within a class, the tenant that was served least: a virtual token counter ("VTC", arXiv
   2401.00588) charged with the predicted length on admission and trued up at the end. A request
   that has waited for half of its time to the deadline counts as if its tenant had been served
   `deadline_loan` tokens less: it goes before other tenants' requests that can wait, and is charged
   all the same. So a tenant that always names deadlines gets ahead by the loan once, and no more.
3. Within a tenant: requests that a worker declined or lost, then overdue ones by arrival, then the
   earliest deadline, then the smallest predicted KV area with ageing. So short answers change the
   order of a tenant's own requests only.

Bounded: a full queue refuses new requests, unless another tenant has more than its share of it.
The caller passes the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.deployments.gate.forecast.sampled import Candidate
from penstock.deployments.gate.types import LOWEST_PRIORITY, Demand, QueueSettings
from penstock.deployments.prediction.distribution import Ints


@dataclass(slots=True)
class Waiting:
    """A waiting request."""

    demand: Demand
    tenant: str
    priority: int
    arrived: float  # seconds of the gate's clock
    number: int  # of its arrival: unique
    expected: float  # tokens of its answer
    area: float = 0.0  # predicted tokens x seconds of KV, as seconds of all the workers' memory
    weight: float = 1.0  # of its tenant, as its newest request says
    deadline: float | None = None  # then it is dropped
    returned: bool = False  # a worker declined it, or was lost
    num_overtaken: int = 0  # later ones admitted before it while it was the first
    predicted_wait: tuple[float, float] = (0.0, 0.0)  # at arrival: fixed, and by what was ahead
    quoted_wait_s: float = 0.0  # the wait predicted from these
    prefix: tuple[int, ...] = ()  # marks of the prompt's beginning
    remaining: Ints | None = None  # [samples] steps to its end in its futures

    _line: tuple[int, bool, bool, float, float, int] | None = None  # its place, unless overdue
    _candidates: dict[int, Candidate] = field(default_factory=dict)  # by block size

    @property
    def request_id(self) -> str:
        return self.demand.request_id

    def candidate(self, block_size: int) -> Candidate:
        """What it asks of a worker with blocks of this size; always the same futures."""
        if block_size not in self._candidates:
            self._candidates[block_size] = self.demand.candidate(block_size, self.remaining)
        return self._candidates[block_size]

    def is_urgent(self, now: float) -> bool:
        """Half of the time that it was given has passed."""
        return self.deadline is not None and now - self.arrived >= self.deadline - now

    def continues_after(self, generated: int) -> None:
        """Its futures begin after that many tokens of its answer."""
        self.demand = replace(self.demand, generated=generated)
        self.remaining = self.demand.remaining()
        self._candidates.clear()

    def is_overdue(self, now: float, max_wait_s: float) -> bool:
        """No other request of its class, or of a lower one, may be admitted before it."""
        return self.returned or now - self.arrived >= max_wait_s


class TenantCounters:
    """Virtual tokens that each tenant has been served."""

    MAX_IDLE = 10_000  # tenants remembered beyond those that are active

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._active: dict[str, int] = {}  # requests that wait
        self._last = 0.0  # the count of the tenant charged last

    def __getitem__(self, tenant: str) -> float:
        return self._counts.get(tenant, 0.0)

    def joins(self, tenant: str) -> None:
        """One more waits. A tenant that was idle has saved up nothing."""
        if tenant not in self._active:
            # With no other tenant waiting: service that others got while none had to wait is not
            # counted against them.
            least = min((self[each] for each in self._active), default=self._last)
            self._counts[tenant] = max(self[tenant], least)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leaves(self, tenant: str) -> None:
        self._active[tenant] -= 1
        if self._active[tenant] == 0:
            del self._active[tenant]

    def charge(self, tenant: str, tokens: float) -> None:
        """Negative: a refund."""
        self._counts[tenant] = self._last = self[tenant] + tokens
        if len(self._counts) > len(self._active) + TenantCounters.MAX_IDLE:
            self._counts = {each: self[each] for each in self._active}


class GateQueue:
    """The waiting requests of one gate."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.counters = TenantCounters()
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def add(self, entry: Waiting) -> None:
        self._waiting[entry.request_id] = entry
        self.counters.joins(entry.tenant)

    def continues_after(self, request_id: str, generated: int) -> None:
        """Workers that were lost have emitted `generated` tokens of a waiting request's answer."""
        self._waiting[request_id].continues_after(generated)

    def remove(self, request_id: str) -> Waiting | None:
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self.counters.leaves(entry.tenant)
        return entry

    def longest_wait(self, now: float) -> float:
        """Seconds since the oldest waiting request arrived; 0: none waits.

        Without those of LOWEST_PRIORITY: no risk is taken for them.
        """
        arrived = (e.arrived for e in self._waiting.values() if e.priority > LOWEST_PRIORITY)
        return now - min(arrived, default=now)

    def arrivals(self) -> dict[str, float]:
        """When each waiting request arrived, by its id."""
        return {name: each.arrived for name, each in self._waiting.items()}

    def displaced_by(self, tenant: str, weight: float = 1.0) -> Waiting | None:
        """Which request leaves a full queue for one of this tenant, which has this weight; None:
        refuse the new one.

        The newest of the lowest priority of the tenant that has most waiting for its weight, if
        that one still has no less than the newcomer's once both are counted.
        """
        counts: dict[str, int] = {}
        for each in self._waiting.values():
            counts[each.tenant] = counts.get(each.tenant, 0) + 1
        weights = {each.tenant: each.weight for each in self._waiting.values()}
        shares = {name: count / weights[name] for name, count in counts.items()}
        largest = max(shares, key=lambda name: shares[name])
        own = (counts.get(tenant, 0) + 1) / weight
        if largest == tenant or own > (counts[largest] - 1) / weights[largest]:
            return None
        theirs = [e for e in self._waiting.values() if e.tenant == largest and not e.returned]
        return min(theirs, key=lambda e: (e.priority, -e.number), default=None)

    def take_expired(self, now: float) -> list[Waiting]:
        """Those whose deadline has passed, taken out."""
        late = [e for e in self._waiting.values() if e.deadline is not None and e.deadline <= now]
        for entry in late:
            self.remove(entry.request_id)
        return late

    def overlong(self, now: float, longest_wait_s: float) -> list[Waiting]:
        """New requests that have waited longer; those of LOWEST_PRIORITY may wait for ever."""
        return [
            e
            for e in self._waiting.values()
            if now - e.arrived > longest_wait_s and not e.returned and e.priority > LOWEST_PRIORITY
        ]

    def order(self, now: float) -> Iterator[Waiting]:
        """All waiting requests in order of service: each is charged before the next is chosen.

        A snapshot: the queue may change during the iteration. O(n), and O(log n) for each one
        that is walked over.
        """
        top = self._top()
        lines: dict[str, list[tuple[tuple, Waiting]]] = {}
        for entry in self._waiting.values():
            lines.setdefault(entry.tenant, []).append((self._key(entry, now, top), entry))
        heap: list[tuple[int, float, int, str]] = []
        counts: dict[str, float] = {}
        for tenant, line in lines.items():
            heapq.heapify(line)  # no two keys are equal
            counts[tenant] = self.counters[tenant]
            heap.append(self._place(line[0][1], counts[tenant], now, top))
        heapq.heapify(heap)
        while heap:
            *_, tenant = heapq.heappop(heap)
            line = lines[tenant]
            _, entry = heapq.heappop(line)
            if line:
                counts[tenant] += self.charge_of(entry)
                heapq.heappush(heap, self._place(line[0][1], counts[tenant], now, top))
            yield entry

    def charge_of(self, entry: Waiting) -> float:
        """What admitting it costs its tenant."""
        return self.settings.charge(entry.weight, entry.demand.prompt_tokens, entry.expected)

    def area_ahead(self, entry: Waiting, now: float) -> float:
        """KV area, seconds of all memory, that is served before this one (waiting or offered).

        Its own tenant's ahead of it; and of every other tenant in its class or above as much as
        fairness gives that one meanwhile, and one more. Never less with a longer queue, which an
        exact walk through the order would not promise.
        """
        top = max(self._top(), entry.priority)
        key, rank = self._key(entry, now, top), self._class(entry, now, top)
        own = entry.area
        others: dict[str, float] = {}
        largest: dict[str, float] = {}
        weights: dict[str, float] = {}
        for each in self._waiting.values():
            if each.request_id == entry.request_id:
                continue
            if each.tenant == entry.tenant:
                own += each.area if self._key(each, now, top) < key else 0.0
            elif self._class(each, now, top) >= rank:
                others[each.tenant] = others.get(each.tenant, 0.0) + each.area
                largest[each.tenant] = max(largest.get(each.tenant, 0.0), each.area)
                weights[each.tenant] = each.weight
        shared = sum(
            min(area, own * weights[name] / entry.weight + largest[name])
            for name, area in others.items()
        )
        return own - entry.area + shared

    def _top(self) -> int:
        return max((each.priority for each in self._waiting.values()), default=0)

    def _class(self, entry: Waiting, now: float, top: int) -> int:
        rises = entry.priority > LOWEST_PRIORITY
        return top if rises and entry.is_overdue(now, self.settings.max_wait_s) else entry.priority

    def _place(
        self, entry: Waiting, count: float, now: float, top: int
    ) -> tuple[int, float, int, str]:
        """Sort key among the first requests of the tenants, smallest first."""
        if entry.is_urgent(now):
            count -= self.settings.deadline_loan
        return (-self._class(entry, now, top), count, entry.number, entry.tenant)

    def _key(
        self, entry: Waiting, now: float, top: int
    ) -> tuple[int, bool, bool, float, float, int]:
        """Within a tenant, smallest first. All age alike, so arrival stands for waiting."""
        if entry.is_overdue(now, self.settings.max_wait_s):
            rank = self._class(entry, now, top)
            return (-rank, not entry.returned, False, 0.0, 0.0, entry.number)
        if entry._line is None:
            deadline = math.inf if entry.deadline is None else entry.deadline
            aged = entry.area + self.settings.ageing * entry.arrived
            entry._line = (-entry.priority, True, True, deadline, aged, entry.number)
        return entry._line
