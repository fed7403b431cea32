"""The gate: who may come in, when, and on which worker. Pure: a simulator drives what serves.

Requests wait here, not at the workers, and are bound to one when it has room (late binding): by
the quantile rule of gate_room, in the order of gate_queue, against the books of gate_ledger. Behind
a first one that does not fit, a few later ones may pass if they leave its reservation alone (EASY
backfill). A request that would wait too long is told so at once.

One owner calls it; nothing is locked. The clock is told, never read: `now` is in seconds and never
goes back. Knows nothing of Ray, gRPC, or how long an answer will be: it is told laws.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from penstock.deployments.gate_choice import Choice, best_of
from penstock.deployments.gate_ledger import Demand, Ledger, Report, Running, WorkerSpec
from penstock.deployments.gate_queue import GateQueue, Waiting
from penstock.deployments.gate_room import Candidate
from penstock.deployments.gate_types import (
    Expiry,
    GateRequest,
    GateSettings,
    Outcome,
    Refusal,
    Ticket,
    Wait,
)
from penstock.deployments.length_distribution import Floats, LengthDistribution, cumulative_hazard
from penstock.deployments.length_histogram import length_prior
from penstock.deployments.prefix_book import PrefixBook

TABLE = 1024  # rows of dice: a million requests have different ones


class Gate:
    """Waiting requests and the books of the workers; all of one model."""

    SHARE = 0.9  # of all memory that is in use when the queue is not empty
    STEP = 0.05  # by which one admission corrects the predicted waits

    def __init__(self, settings: GateSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or GateSettings()
        self.queue = GateQueue(self.settings.queue)
        self.ledgers: dict[str, Ledger] = {}
        self.wait_factor = 1.0  # seconds waited per second of memory ahead
        self._prefixes: PrefixBook[tuple[str, str]] = PrefixBook()  # by worker and epoch
        rng, samples = np.random.default_rng(seed), self.settings.num_samples
        # A generator for each request would cost 50 us.
        self._strata = rng.permuted(np.tile(np.arange(samples), (TABLE, 1)), axis=1)
        self._places = rng.random((TABLE, samples))
        self._number = 0
        self._pace_s: float | None = None  # seconds of a step, mean of all workers; None: anew
        self._capacity = 1 << 16  # of all workers, when last there were any
        self._displaced: list[Refusal] = []
        self._admitted: dict[str, tuple[str, Waiting]] = {}  # running: worker, and what was charged
        self._strangers: set[str] = set()  # running, and came past the gate
        self._first_fits_at: float | None = None
        self._reserved: tuple[str, str, float] | None = None  # request, worker, and when
        self._stranger = LengthDistribution(cumulative_hazard(length_prior()))

    def add_worker(self, spec: WorkerSpec) -> list[str]:
        """A worker, or a new life of one; returns what was admitted to the old life."""
        known = self.ledgers.get(spec.name)
        if known is not None and known.spec == spec:
            return []
        lost = self.remove_worker(spec.name)
        self.ledgers[spec.name], self._pace_s = Ledger(spec), None
        self._capacity = sum(each.spec.capacity for each in self.ledgers.values())
        return lost

    def remove_worker(self, name: str) -> list[str]:
        """A worker is gone; returns what was admitted to it, for whoever sends it elsewhere."""
        ledger = self.ledgers.pop(name, None)
        if ledger is None:
            return []
        self._prefixes.forget((name, ledger.spec.epoch))
        self._pace_s = None
        self._strangers = {each for each in self._strangers if each not in ledger}
        lost = [each for each, (worker, _) in self._admitted.items() if worker == name]
        for each in lost:
            del self._admitted[each]
        if self.ledgers:
            self._capacity = sum(each.spec.capacity for each in self.ledgers.values())
        return lost

    def offer(
        self,
        request: GateRequest,
        law: LengthDistribution,
        now: float,
        *,
        holding: LengthDistribution | None = None,
    ) -> Refusal | None:
        """A request comes: it waits (None), and `tick` will tell; or is refused at once.

        `law` is of the answer's length, for order and charges; `holding` of how long its memory is
        held, clients that leave included (None: the same). Raises ValueError for an id that waits
        or runs already.
        """
        name = request.request_id
        if name in self.queue or name in self._admitted or name in self._strangers:
            raise ValueError(f"request_id {name!r} is already here: give each request its own")
        demand = Demand(
            name, request.prompt_tokens, holding or law, self._dice(name), request.ceiling
        )
        entry = self._entry(request, demand, law, now)
        if self.ledgers and not self._could_fit(demand):
            return _never(entry, max(each.spec.capacity for each in self.ledgers.values()))
        fixed = max((self._first_fits_at or now) - now, 0.0) if len(self.queue) else 0.0
        ahead = self.queue.area_ahead(entry, now) / Gate.SHARE
        wait = fixed + self.wait_factor * ahead
        room_s = self.settings.longest_wait_s
        if request.deadline is not None:
            room_s = min(room_s, request.deadline - now)
        if wait > room_s:
            text = f"it would wait {wait:.1f} s, and may {max(room_s, 0.0):.1f} s"
            return self._refuse(entry, "too_long", text, wait - room_s / 2)
        if len(self.queue) >= self.settings.queue.max_waiting:
            leaves = self.queue.displaced_by(request.tenant)
            if leaves is None:
                return self._refuse(entry, "queue_full", f"{len(self.queue)} requests wait", wait)
            self.queue.remove(leaves.request_id)
            text = "the queue is full, and its tenant has the most waiting"
            later = sum(leaves.predicted_wait)
            self._displaced.append(self._refuse(leaves, "displaced", text, later))
        entry.predicted_wait, entry.told_s = (fixed, ahead), wait
        self.queue.add(entry)
        return None

    def entered(
        self,
        request: GateRequest,
        law: LengthDistribution,
        worker: str,
        now: float,
        *,
        holding: LengthDistribution | None = None,
    ) -> None:
        """A request that went in without asking, as it was allowed to: the books hear of it."""
        name, ledger = request.request_id, self.ledgers.get(worker)
        if ledger is None or name in self.queue or name in self._admitted:
            return
        demand = Demand(
            name, request.prompt_tokens, holding or law, self._dice(name), request.ceiling
        )
        entry = self._entry(request, demand, law, now)
        ledger.withdraw(name)  # a report was faster, and knows less
        self._strangers.discard(name)
        ledger.lease(demand, now + self.settings.lease_s)
        self.queue.counters.charge(entry.tenant, self.queue.charge_of(entry))
        self._admitted[name] = (worker, entry)
        self._sent(entry, ledger)

    def let_in(self, request: GateRequest, max_tokens: int | None, now: float) -> Ticket | None:
        """Come in unseen: with nobody waiting, where there is room whatever its length becomes.

        No law is needed for that, and so it takes a moment. On its worker it is held by the broad
        law until `entered` tells its own. None: it has to be judged, by `offer`.
        """
        name = request.request_id
        if len(self.queue) or self.is_admitted(name):
            return None
        demand, hits = self._unseen(request, max_tokens), self._hits(request.prefix)
        near = Choice(self.ledgers, self.settings, now).near(demand, hits)
        able = [(self.ledgers[e].load, e) for e in near if self.ledgers[e].takes_unseen(demand)]
        if not able or not hits.keys() <= {each for _, each in able}:
            return None  # where its beginning is cached, there may be room as well
        ledger, until = self.ledgers[best_of(able, hits)], now + self.settings.lease_s
        ledger.lease(demand, until)
        self._strangers.add(name)
        return Ticket(name, ledger.spec.name, ledger.spec.epoch, 0.0, until)

    def hold(self, request: GateRequest, max_tokens: int | None, worker: str, now: float) -> bool:
        """One went in without asking: the books have it by the broad law until `entered`."""
        name, ledger = request.request_id, self.ledgers.get(worker)
        if name in self._strangers and ledger is not None and name in ledger:
            return True  # since it was let in, or a report listed it
        if ledger is None or name in self.queue or self.is_admitted(name):
            return False
        ledger.lease(self._unseen(request, max_tokens), now + self.settings.lease_s)
        self._strangers.add(name)
        return True

    def is_admitted(self, request_id: str) -> bool:
        """Whether it is on a worker, with or without the gate's knowing, and not over yet."""
        return request_id in self._admitted or request_id in self._strangers

    def spare(self) -> dict[str, tuple[int, int]]:
        """By worker: tokens and slots that nobody will need, however long all answers become."""
        return {name: each.spare() for name, each in self.ledgers.items()}

    def cancel(self, request_id: str, now: float) -> bool:
        """The client left; True if it waited (a running one ends with `completed`)."""
        return self.queue.remove(request_id) is not None

    def started(self, request_id: str, now: float) -> None:
        """The worker has the request: the lease becomes a holding."""
        if request_id in self._admitted:
            self.ledgers[self._admitted[request_id][0]].started(request_id, now)

    def declined(self, request_id: str, now: float) -> bool:
        """The worker had no room: back to the queue, and no more for it until it reports."""
        if request_id in self._strangers:  # let in, and not judged yet: it comes as a new one
            self._strangers.remove(request_id)
            for ledger in self.ledgers.values():
                if ledger.ended(request_id, now):
                    ledger.is_open = False
        if request_id not in self._admitted:
            return False
        worker, entry = self._admitted.pop(request_id)
        self.ledgers[worker].ended(request_id, now)  # a report under way may still list it
        self.ledgers[worker].is_open = False
        self.queue.counters.charge(entry.tenant, -self.queue.charge_of(entry))
        entry.returned = True
        self.queue.add(entry)
        return True

    def completed(self, request_id: str, generated: int, now: float) -> None:
        """An answer ended after so many tokens, for whatever reason: its memory is free."""
        books = list(self.ledgers.values())
        if request_id in self._strangers:
            self._strangers.remove(request_id)  # it may be anywhere, and on two workers
        elif request_id in self._admitted:
            books = [self.ledgers[self._admitted[request_id][0]]]
        else:
            return
        for ledger in books:
            if ledger.ended(request_id, now):
                ledger.headroom.count(completions=1)
        if request_id not in self._admitted:
            return
        _, entry = self._admitted.pop(request_id)
        settings = self.queue.settings
        owed = settings.charge(entry.tenant, entry.demand.prompt_tokens, generated)
        self.queue.counters.charge(entry.tenant, owed - self.queue.charge_of(entry))

    def report(self, worker: str, report: Report, now: float) -> None:
        """A worker says what it runs. Workers that are not known are not listened to."""
        ledger = self.ledgers.get(worker)
        if ledger is None:
            return
        self._pace_s = None
        strangers = {each.request_id: self._adopt(each) for each in ledger.unknown(report)}
        self._strangers.update(strangers)
        for gone in ledger.report(report, now, strangers):
            self._strangers.discard(gone)
            self._admitted.pop(gone, None)  # its charge stays: how long it became is not known

    def tick(self, now: float) -> list[Outcome]:
        """Whatever was decided by now: tickets, and those that leave the queue without one."""
        outcomes: list[Outcome] = [*self._displaced]
        self._displaced = []
        for entry in self.queue.take_expired(now):
            outcomes.append(Expiry(entry.request_id, now - entry.arrived))
        for ledger in self.ledgers.values():
            for name in ledger.expire(now):
                self._strangers.discard(name)
                if name in self._admitted:
                    _, entry = self._admitted.pop(name)
                    self.queue.counters.charge(entry.tenant, -self.queue.charge_of(entry))
        if not len(self.queue):
            self._first_fits_at = None
        elif self.ledgers:
            outcomes.extend(self._admit(now))
        return outcomes

    def explain(self, now: float, limit: int = 32) -> list[Wait]:
        """Why the first of those that wait do, and until when. Changes nothing."""
        rooms = Choice(self.ledgers, self.settings, now, self.queue.longest_wait(now))
        waits: list[Wait] = []
        first_s: float | None = None
        for position, entry in enumerate(islice(self.queue.order(now), limit)):
            waited = now - entry.arrived
            if position == 0:
                wait = self._explain_first(entry, rooms, now)
                first_s = wait.expected_s
            else:
                expected = None
                if first_s is not None:
                    ahead = self.queue.area_ahead(entry, now) / Gate.SHARE
                    expected = first_s + self.wait_factor * ahead
                reason = "behind" if rooms else "no_worker"
                wait = Wait(entry.request_id, entry.tenant, position, reason, waited, expected)
            waits.append(wait)
        return waits

    def _admit(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        rooms = Choice(self.ledgers, self.settings, now, self.queue.longest_wait(now))
        order = self.queue.order(now)
        self._first_fits_at = None
        for entry in order:
            if not self._could_fit(entry.demand):  # the worker that could is gone
                self.queue.remove(entry.request_id)
                largest = max(each.spec.capacity for each in self.ledgers.values())
                outcomes.append(_never(entry, largest))
                continue
            [able] = self._able([entry], rooms)
            if able:
                worker = best_of(able, self._hits(entry.prefix))
                outcomes.append(self._grant(entry, worker, rooms, now))
                continue
            outcomes.extend(self._backfill(entry, order, rooms, now))
            break
        return outcomes

    def _backfill(
        self, first: Waiting, order: Iterator[Waiting], rooms: Choice, now: float
    ) -> list[Outcome]:
        """Later ones that fit and leave the first one's reservation alone."""
        reserved = self._reservation(first, rooms, now)
        if reserved is None:
            return []
        steps, kept = reserved
        self._first_fits_at = now + steps * self.ledgers[kept].step_s
        self._reserved = (first.request_id, kept, self._first_fits_at)
        outcomes: list[Outcome] = []
        own = self._candidate(first, kept)
        max_wait_s = self.settings.queue.max_wait_s
        later = list(islice(order, self.settings.max_passes))
        all_able = self._able(later, rooms)
        for i, entry in enumerate(later):
            if first.num_passed >= self.settings.max_passes or first.is_overdue(now, max_wait_s):
                break
            able = all_able[i]
            for place, name in enumerate(each[1] for each in able):
                if name == kept:
                    joined = rooms[kept].joined_by(self._candidate(entry, kept))
                    if not joined.admits_after(steps, own):
                        del able[place]
                    break
            if able:
                first.num_passed += 1
                worker = best_of(able, self._hits(entry.prefix))
                outcomes.append(self._grant(entry, worker, rooms, now))
                all_able[i + 1 :] = self._able(later[i + 1 :], rooms)
        return outcomes

    def _reservation(self, first: Waiting, rooms: Choice, now: float) -> tuple[int, str] | None:
        """Where the first one will fit, and after how many steps: the soonest that is found.

        What was reserved before is asked again. The rule is not monotone in time, and a search
        that skips a moment it had found would let later ones delay it.
        """
        found = self._soonest(first, rooms)
        request_id, worker, at = self._reserved or ("", "", 0.0)
        if request_id != first.request_id or worker not in self.ledgers:
            return found
        step_s = self.ledgers[worker].step_s
        steps = max(round((at - now) / step_s), 0)
        if found is not None and found[0] * self.ledgers[found[1]].step_s <= steps * step_s:
            return found
        holds = rooms[worker].admits_after(steps, self._candidate(first, worker))
        return (steps, worker) if holds else found

    def _able(self, entries: Sequence[Waiting], rooms: Choice) -> list[list[tuple[float, str]]]:
        """For each: workers with room for it, with its predicted peak as a share."""
        able: list[list[tuple[float, str]]] = [[] for _ in entries]
        near: dict[str, list[int]] = {}  # by worker: places in `entries` for which it is looked at
        for i, entry in enumerate(entries):
            for name in rooms.near(entry.demand, self._hits(entry.prefix)):
                near.setdefault(name, []).append(i)
        for name, places in near.items():
            room = rooms[name]
            peaks = room.peaks_if_admitted([self._candidate(entries[i], name) for i in places])
            for i, peak in zip(places, peaks):
                if peak is not None:
                    able[i].append((peak / room.capacity, name))
        return able

    def _hits(self, prefix: Sequence[int]) -> dict[str, int]:
        """By worker: tokens of such a prompt that it probably has in its prefix cache."""
        found = self._prefixes.hits(prefix) if len(self.ledgers) > 1 else {}
        return {name: tokens for (name, _), tokens in found.items()}

    def _sent(self, entry: Waiting, ledger: Ledger) -> None:
        spec, tokens = ledger.spec, entry.demand.prompt_tokens + round(entry.expected)
        self._prefixes.note(entry.prefix, (spec.name, spec.epoch), tokens, spec.capacity)

    def _soonest(self, entry: Waiting, rooms: Choice) -> tuple[int, str] | None:
        """Where it fits soonest, and after how many steps there."""
        best: tuple[float, int, str] | None = None
        for name in rooms.near(entry.demand):
            steps = rooms[name].fits_after(self._candidate(entry, name))
            if steps is not None:
                found = (steps * self.ledgers[name].step_s, steps, name)
                best = min(best, found) if best is not None else found
        return None if best is None else best[1:]

    def _grant(self, entry: Waiting, worker: str, rooms: Choice, now: float) -> Ticket:
        ledger = self.ledgers[worker]
        until = now + self.settings.lease_s
        if entry.request_id in ledger:  # by a report of an earlier stay
            ledger.withdraw(entry.request_id)
            self._strangers.discard(entry.request_id)
        ledger.lease(entry.demand, until)
        rooms.grant(worker, self._candidate(entry, worker))
        self.queue.remove(entry.request_id)
        self.queue.counters.charge(entry.tenant, self.queue.charge_of(entry))
        self._admitted[entry.request_id] = (worker, entry)
        self._sent(entry, ledger)
        waited = now - entry.arrived
        fixed, ahead = entry.predicted_wait
        if ahead > 0:
            ratio = min(max((waited - fixed) / ahead, 0.1), 10.0)
            self.wait_factor += Gate.STEP * (ratio - self.wait_factor)
        epoch = ledger.spec.epoch
        return Ticket(entry.request_id, worker, epoch, waited, until, entry.told_s)

    def _explain_first(self, entry: Waiting, rooms: Choice, now: float) -> Wait:
        waited = now - entry.arrived
        soonest = self._soonest(entry, rooms)
        if soonest is None:
            reason = "slots" if rooms else "no_worker"
            return Wait(entry.request_id, entry.tenant, 0, reason, waited, None)
        steps, name = soonest
        room = rooms[name]
        peak = room.peak_with(self._candidate(entry, name))
        reason = "slots" if room.slots < 1 else "memory"
        seconds = steps * self.ledgers[name].step_s
        return Wait(
            entry.request_id, entry.tenant, 0, reason, waited, seconds, name, peak, room.limit
        )

    def _entry(
        self, request: GateRequest, demand: Demand, law: LengthDistribution, now: float
    ) -> Waiting:
        """With its expected length, and the tokens x seconds of KV that it will take."""
        self._number += 1
        remaining = demand.remaining()
        steps = remaining.astype(np.float64)
        area = float((request.prompt_tokens * steps + steps**2 / 2).mean())
        if self._pace_s is None:
            paces = [each.step_s for each in self.ledgers.values()] or [0.03]
            self._pace_s = sum(paces) / len(paces)
        return Waiting(
            demand=demand,
            tenant=request.tenant,
            priority=request.priority,
            arrived=now,
            number=self._number,
            expected=law.mean,
            area=area * self._pace_s / self._capacity,
            deadline=request.deadline,
            prefix=request.prefix,
            remaining=remaining,
        )

    def _candidate(self, entry: Waiting, worker: str) -> Candidate:
        return entry.candidate(self.ledgers[worker].spec.block_size)

    def _could_fit(self, demand: Demand) -> bool:
        return any(
            demand.longest(each.spec.block_size) <= each.spec.capacity
            for each in self.ledgers.values()
        )

    def _dice(self, request_id: str) -> Floats:
        """[samples] stratified uniform numbers of a request's own: they do not hang on others."""
        drawn = zlib.crc32(request_id.encode())
        strata, places = self._strata[drawn % TABLE], self._places[drawn // TABLE % TABLE]
        u: Floats = (strata + places) / self.settings.num_samples
        return u

    def _unseen(self, request: GateRequest, max_tokens: int | None) -> Demand:
        law = LengthDistribution(self._stranger.cumulative, max_tokens)
        name = request.request_id
        return Demand(name, request.prompt_tokens, law, self._dice(name), request.ceiling)

    def _adopt(self, running: Running) -> Demand:
        """A demand for an answer that came past the gate: the broad law of the beginning."""
        law = LengthDistribution(self._stranger.cumulative, running.max_tokens)
        name = running.request_id
        return Demand(name, running.prompt_tokens, law, self._dice(name))

    def _refuse(self, entry: Waiting, reason: str, text: str, after_s: float) -> Refusal:
        """Its own dice spread the time to stay away by a fifth: not all come back at once."""
        least, most = self.settings.retry_s
        spread = 0.8 + 0.4 * float(entry.demand.u[0])
        after = min(max(after_s, least), most) * spread
        return Refusal(entry.request_id, reason, f"refused for now: {text}", after)


def _never(entry: Waiting, capacity: int) -> Refusal:
    text = (
        f"prompt_tokens ({entry.demand.prompt_tokens}) and max_tokens "
        f"({entry.demand.law.max_tokens}) exceed the {capacity} KV tokens of the largest worker: "
        "ask for fewer tokens"
    )
    return Refusal(entry.request_id, "never_fits", text)
