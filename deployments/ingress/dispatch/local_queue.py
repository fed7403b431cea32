"""Where requests wait at their ingress, while the gate does not answer.

An ingress knows neither the requests of others nor the memory that is free, so it sends each worker
only its share of what the worker runs at a time, and a few more. What exceeds that waits here:
bounded in requests and in bytes, the tenants in turn, by their weights. When the gate answers
again, the waiting requests go there, a few at a time: all at once would be more than it answers in
time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest

log = logging.getLogger("penstock.gate")

MAX_QUEUED = 256
MAX_QUEUED_BYTES = 64 << 20
TOKEN_BYTES = 36  # of a prompt: an integer, and its place
FURTHER = 4  # requests of a worker beyond its share, so that a slot that is free is filled at once
LOOK_S = 0.25  # from one look at the gate to the next
RELEASED, RELEASE_S = 16, 0.05  # requests that go to the gate at a time, and until the next ones
RETRY_S = (1.0, 60.0)  # least and most


def share_of(max_num_seqs: int, num_ingresses: int) -> int:
    """How many requests one ingress sends to a worker without the gate."""
    return -(-max(max_num_seqs, 1) // max(num_ingresses, 1)) + FURTHER


class Seat:
    """The place of one request, which it keeps until it is at a worker or has ended."""

    def __init__(self, call: InFlightRequest, number: int):
        self.call, self.number = call, number
        self.tenant = call.admission.features.tenant
        self.weight = call.admission.weight
        self.num_bytes = size_of(call.admission)
        # True: it was sent to a worker. False: the gate is there again.
        self.turn: asyncio.Future[bool] | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.call.request.priority, self.number


class LocalQueue:
    """The waiting requests of one ingress. Lives on one event loop."""

    def __init__(
        self, place: Callable[[InFlightRequest], bool], gate_answers: Callable[[], bool]
    ) -> None:
        """`place`: sends a request to a worker that has room for it; False: none has."""
        self._place, self._gate_answers = place, gate_answers
        self._seats: set[Seat] = set()
        self._num_bytes = 0
        self._waiting: dict[str, list[Seat]] = {}  # by tenant
        # By tenant: turns that it has had, each divided by its weight, and the number of the last.
        self._turns: dict[str, tuple[float, int]] = {}
        self._turn = 0.0  # of the tenant that had the last one
        self._number = itertools.count()
        self._gap_s = 0.1  # from one placed request to the next
        self._placed_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def take_seat(self, call: InFlightRequest) -> Seat:
        """A place for `call`; give it back with `leave`. Raises ServiceError if there is none.

        In a full queue the tenant with the most places for its weight gives one to a tenant with
        fewer.
        """
        seat = Seat(call, next(self._number))
        while self._is_full_for(seat):
            self._make_room(seat)
        self._seats.add(seat)
        self._num_bytes += seat.num_bytes
        return seat

    async def turn(self, seat: Seat) -> bool:
        """Wait: True once the request was sent to a worker, False once the gate answers.

        Raises ServiceError if a request of another tenant gets its place.
        """
        loop = asyncio.get_running_loop()
        seat.turn = loop.create_future()
        if seat.tenant not in self._waiting:
            self._join(seat)
        insort(self._waiting[seat.tenant], seat, key=lambda each: each.order)
        self.place_next()
        if self._timer is None and self._waiting:
            self._timer = loop.call_later(LOOK_S, self._look)
        try:
            return await seat.turn
        finally:
            self._forget(seat)

    def leave(self, seat: Seat) -> None:
        """The request is at a worker, or has ended."""
        if seat in self._seats:
            self._seats.remove(seat)
            self._num_bytes -= seat.num_bytes

    def place_next(self) -> None:
        """Send waiting requests to workers while they have room, the tenants in turn."""
        while self._waiting:
            seat = self._waiting[self._next_tenant()][0]
            if not self._place(seat.call):
                return
            now_s = asyncio.get_running_loop().time()
            self._gap_s += 0.05 * (min(now_s - self._placed_s, 1.0) - self._gap_s)
            self._placed_s = now_s
            self._has_had_a_turn(seat)
            self._end_turn(seat, True)

    def release(self) -> None:
        """All that wait ask the gate again."""
        for seats in list(self._waiting.values()):
            for seat in list(seats):
                self._end_turn(seat, False)

    def _look(self) -> None:
        self._timer, is_there = None, self._gate_answers()
        if is_there:
            self._release_some()
        else:
            self.place_next()
        if self._waiting:
            again_s = RELEASE_S if is_there else LOOK_S
            self._timer = asyncio.get_running_loop().call_later(again_s, self._look)

    def _release_some(self) -> None:
        for _ in range(RELEASED):
            if not self._waiting:
                return
            seat = self._waiting[self._next_tenant()][0]
            self._has_had_a_turn(seat)
            self._end_turn(seat, False)

    def _join(self, seat: Seat) -> None:
        """A tenant waits that did not. It has saved up nothing meanwhile, and owes what it owed."""
        if len(self._turns) > 2 * MAX_QUEUED:
            self._turns = {name: self._turns[name] for name in self._waiting}
        turn, _ = self._turns.get(seat.tenant, (0.0, 0))
        self._turns[seat.tenant] = (max(turn, self._turn), seat.number)
        self._waiting[seat.tenant] = []

    def _next_tenant(self) -> str:
        """Whose turn it is: of the waiting tenants the one with the fewest turns for its weight,
        and of several the one that had none for longest."""
        return min(self._waiting, key=self._turns.__getitem__)

    def _has_had_a_turn(self, seat: Seat) -> None:
        turn, _ = self._turns[seat.tenant]
        self._turn = turn
        self._turns[seat.tenant] = (turn + 1.0 / seat.weight, next(self._number))

    def _end_turn(self, seat: Seat, is_placed: bool) -> None:
        self._forget(seat)
        if seat.turn is not None and not seat.turn.done():
            seat.turn.set_result(is_placed)

    def _forget(self, seat: Seat) -> None:
        seats = self._waiting.get(seat.tenant, [])
        if seat in seats:
            seats.remove(seat)
            if not seats:
                del self._waiting[seat.tenant]

    def _is_full_for(self, seat: Seat) -> bool:
        is_large = self._num_bytes + seat.num_bytes > MAX_QUEUED_BYTES
        return len(self._seats) >= MAX_QUEUED or (is_large and bool(self._seats))

    def _make_room(self, seat: Seat) -> None:
        counts = Counter(each.tenant for each in self._seats)
        weights = {each.tenant: each.weight for each in self._seats}
        weights[seat.tenant] = seat.weight
        most = max(self._waiting, key=lambda name: counts[name] / weights[name], default=None)
        own = (counts[seat.tenant] + 1) / seat.weight
        if most is None or most == seat.tenant or own > (counts[most] - 1) / weights[most]:
            raise ServiceError(
                "overloaded",
                "too many requests wait at this server, which cannot reach its gate",
                retry_after_s=self.retry_after_s(len(self._seats)),
            )
        leaves = self._waiting[most][-1]
        self._forget(leaves)
        self.leave(leaves)
        if leaves.turn is not None and not leaves.turn.done():
            after_s = self.retry_after_s(counts[most] * len(counts))
            leaves.turn.set_exception(ServiceError("over_share", retry_after_s=after_s))

    def retry_after_s(self, num_ahead: int) -> float:
        """When so many requests will have been sent to workers, at the pace of the last ones."""
        now_s = asyncio.get_running_loop().time()
        gap_s = max(self._gap_s, min(now_s - self._placed_s, 1.0)) if self._placed_s else 0.1
        return min(max(num_ahead * gap_s, RETRY_S[0]), RETRY_S[1])


def size_of(admission: AdmissionRequest) -> int:
    """About the bytes of memory that a waiting request holds."""
    return TOKEN_BYTES * len(admission.request.prompt_ids) + len(admission.text or "")
