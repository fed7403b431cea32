"""Which waiting requests are admitted now, how long others wait, and when refused ones may return.

In the order of wait_queue.py, to workers with room (placement.py). After a first one that does not
fit, a few later ones may be admitted if they leave its reservation alone (EASY backfill). A
predicted wait is the time until the first one fits, and the work ahead by a factor that each
admission corrects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from penstock.deployments.gate.forecast.pressure import Pressure
from penstock.deployments.gate.forecast.retry_after import RetryAfterModel
from penstock.deployments.gate.forecast.start_times import GIVEN_UP, StartTimes
from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.placement import Placement, WorkerShortlist
from penstock.deployments.gate.running import RunningRequests
from penstock.deployments.gate.types import GateSettings, Outcome, Reason, Refusal, Ticket, Wait
from penstock.deployments.gate.wait_queue import GateQueue, Waiting


class QueueAdmission:
    """Empties the queue of one gate into the ledgers of its workers."""

    SHARE = 0.9  # of all memory that is in use when the queue is not empty
    STEP = 0.05  # by which one admission corrects the predicted waits
    LOOKED_AT = 4  # times `max_backfills`: later requests that are judged at once, at most

    def __init__(
        self,
        settings: GateSettings,
        queue: GateQueue,
        ledgers: Mapping[str, Ledger],
        placement: Placement,
        running: RunningRequests,
        starts: StartTimes,
    ) -> None:
        self.settings = settings
        self.queue = queue
        self.wait_factor = 1.0  # seconds waited per second of memory ahead
        self.retry_after = RetryAfterModel(self.would_wait)
        self.pressure = Pressure(settings.pressed_s)
        self._ledgers = ledgers
        self._placement = placement
        self._running = running
        self._starts = starts

    def explain(self, now: float, limit: int = 32) -> list[Wait]:
        """Why the first `limit` requests wait, and until when. Changes nothing."""
        shortlist = self._shortlist(now)
        waits: list[Wait] = []
        first_s: float | None = None
        for position, entry in enumerate(islice(self.queue.order(now), limit)):
            waited = now - entry.arrived
            if position == 0:
                wait = self._placement.explain(entry, shortlist, now)
                first_s = wait.expected_s
                if self.must_wake:
                    first_s = self._starts.remaining_s(now)
                    wait = replace(wait, expected_s=first_s)
            else:
                expected = None
                if first_s is not None:
                    ahead = self.queue.area_ahead(entry, now) / QueueAdmission.SHARE
                    expected = first_s + self.wait_factor * ahead
                reason = "behind" if shortlist else "no_worker"
                wait = Wait(entry.request_id, entry.tenant, position, reason, waited, expected)
            waits.append(wait)
        return waits

    def _shortlist(self, now: float) -> WorkerShortlist:
        pressed_s = self.pressure.after(self.queue.longest_wait(now), now)
        return WorkerShortlist(self._ledgers, self.settings, now, pressed_s)

    def admit(self, now: float) -> list[Outcome]:
        """Tickets for waiting requests, in the order of the queue until one does not fit, and then
        for later ones that leave its reservation alone."""
        outcomes: list[Outcome] = []
        shortlist = self._shortlist(now)
        order = self.queue.order(now)
        self._placement.first_fits_at = None
        for entry in order:
            if self._placement.lacks_tokenizer(entry.demand):  # it holds up no other one
                if (refusal := self._without_tokenizer(entry, now)) is not None:
                    self.queue.remove(entry.request_id)
                    outcomes.append(refusal)
                continue
            if not self._placement.could_fit(entry.demand):  # the only worker large enough is gone
                self.queue.remove(entry.request_id)
                outcomes.append(never_fits(entry, self._placement.largest(entry.demand)))
                continue
            [able] = self._placement.able([entry], shortlist)
            if able:
                worker = self._placement.best(able, entry)
                outcomes.append(self._grant(entry, worker, shortlist, now))
                continue
            outcomes.extend(self._backfill(entry, order, shortlist, now))
            break
        return outcomes

    def _backfill(
        self, first: Waiting, order: Iterator[Waiting], shortlist: WorkerShortlist, now: float
    ) -> list[Outcome]:
        """Admit later requests that fit and do not delay the first one's reservation."""
        reserved = self._placement.reserve(first, shortlist, now)
        if reserved is None:
            return []
        steps, kept = reserved
        outcomes: list[Outcome] = []
        own = self._placement.candidate(first, kept)
        max_wait_s = self.settings.queue.max_wait_s
        each, num_workers = self.settings.max_backfills, max(1, len(self._ledgers))
        later = list(islice(order, each * min(num_workers, QueueAdmission.LOOKED_AT)))
        all_able = self._placement.able(later, shortlist)
        for i, entry in enumerate(later):
            if first.num_overtaken >= each * num_workers or first.is_overdue(now, max_wait_s):
                break
            able = all_able[i]
            for place, name in enumerate(each[1] for each in able):
                if name == kept:
                    joined = shortlist[kept].joined_by(self._placement.candidate(entry, kept))
                    if not joined.admits_after(steps, own):
                        del able[place]
                    break
            if able:
                first.num_overtaken += 1
                worker = self._placement.best(able, entry)
                outcomes.append(self._grant(entry, worker, shortlist, now))
                all_able[i + 1 :] = self._placement.able(later[i + 1 :], shortlist)
        return outcomes

    def _grant(self, entry: Waiting, worker: str, shortlist: WorkerShortlist, now: float) -> Ticket:
        ledger = self._ledgers[worker]
        until = now + self.settings.lease_s
        self._running.admit(entry, ledger, until)
        shortlist.grant(worker, self._placement.candidate(entry, worker))
        self.queue.remove(entry.request_id)
        tokens = entry.demand.prompt_tokens + round(entry.expected)
        self._placement.sent(entry.prefix, tokens, ledger)
        waited = now - entry.arrived
        self._learn_wait(entry, waited)
        epoch = ledger.spec.epoch
        return Ticket(entry.request_id, worker, epoch, waited, until, entry.quoted_wait_s)

    def _learn_wait(self, entry: Waiting, waited_s: float) -> None:
        fixed, ahead = entry.predicted_wait
        if ahead > 0:
            ratio = min(max((waited_s - fixed) / ahead, 0.1), 10.0)
            self.wait_factor += QueueAdmission.STEP * (ratio - self.wait_factor)

    @property
    def must_wake(self) -> bool:
        """Whether requests wait for a worker that is still to be started."""
        return self.settings.may_wake and all(each.is_draining for each in self._ledgers.values())

    def would_wait(self, entry: Waiting, now: float) -> float:
        """Seconds that it would wait, or still waits, as predicted."""
        fixed, ahead = self.predicted_wait(entry, now)
        return fixed + self.wait_factor * ahead

    def predicted_wait(self, entry: Waiting, now: float) -> tuple[float, float]:
        """Seconds until the first one fits, and seconds of all memory served before `entry`.

        Without a worker: until one is ready, and by the memory of the last that there was.
        """
        if self.must_wake:
            return self._starts.remaining_s(now), self.queue.area_ahead(
                entry, now
            ) / QueueAdmission.SHARE
        fixed = max((self._placement.first_fits_at or now) - now, 0.0) if len(self.queue) else 0.0
        return fixed, self.queue.area_ahead(entry, now) / QueueAdmission.SHARE

    def refuse_until_ready(self, entry: Waiting, text: str, wait_s: float) -> Refusal:
        """Its client cannot wait for a worker's start, and may return when there is one.

        Not bounded as other Retry-Afters are: before, it would only be refused again.
        """
        after_s = wait_s * (1.0 + 0.2 * float(entry.demand.uniforms[0]))
        text = f"no worker runs, and one is being started: {text}"
        return Refusal(entry.request_id, "no_worker", text, after_s)

    def _without_tokenizer(self, entry: Waiting, now: float) -> Refusal | None:
        """No worker that takes requests has its tokenizer: it waits (None), or is refused.

        In an update that changes the model, workers of a new ingress may still be starting. Those
        of an old one drain, and no other will come: its client does better with another ingress.
        """
        own = entry.demand.tokenizer
        specs = {each.spec.tokenizer: each.spec for each in self._ledgers.values()}
        waited_s = now - entry.arrived
        patience_s = min(GIVEN_UP * self._starts.predicted_s, self.settings.longest_wait_s)
        if own not in specs and waited_s <= patience_s:
            return None
        others = ", ".join(sorted(name for name in specs if name != own))
        text = (
            f"no worker that takes requests has this ingress's tokenizer (digest {own}, not "
            f"{others}): in an update of the model this passes; else the ingress and the workers "
            "have different files of the model: compare them"
        )
        least_s = self.settings.retry_s[0]
        after_s = least_s if own in specs else self._starts.predicted_s
        return Refusal(entry.request_id, "no_worker", text, max(after_s, least_s))

    def refuse_overlong(self, now: float) -> list[Refusal]:
        """Those that have waited longer than they may: their waits were predicted too short.

        Their answers would be late whatever happens; their room serves others in time.
        """
        refusals = []
        limit_s = self.settings.longest_wait_s
        for entry in self.queue.overlong(now, limit_s):
            if self._placement.lacks_tokenizer(entry.demand):
                continue  # refused with its own text, when that has lasted too long
            self.queue.remove(entry.request_id)
            self._learn_wait(entry, now - entry.arrived)  # the least that it would have been
            text = f"it has waited {now - entry.arrived:.1f} s, the limit is {limit_s:.1f} s"
            after_s = self.would_wait(entry, now) - limit_s / 2
            refusals.append(self.refuse(entry, "too_long", text, after_s, now))
        return refusals

    def refuse(
        self,
        entry: Waiting,
        reason: Reason,
        text: str,
        after_s: float,
        now: float,
        patience_s: float | None = None,
    ) -> Refusal:
        """For want of room. Its own uniforms spread Retry-After by a fifth, so that not all return
        at once.

        `patience_s`: the longest it may wait; with it the refusal calibrates Retry-After.
        """
        if entry.deadline is None:  # one of a millisecond is the client's own affair
            self.pressure.refused(now)
        least, most = self.settings.retry_s
        spread = 0.8 + 0.4 * float(entry.demand.uniforms[0])
        after = min(max(self.retry_after.factor * after_s, least), most) * spread
        if patience_s is not None:
            self.retry_after.watch(entry, entry.arrived, after_s, patience_s, after)
        return Refusal(entry.request_id, reason, f"refused for now: {text}", after)


def never_fits(entry: Waiting, capacity: int) -> Refusal:
    text = (
        f"prompt_tokens ({entry.demand.prompt_tokens}) and max_tokens "
        f"({entry.demand.length.max_tokens}) exceed the {capacity} KV tokens of the largest "
        "worker: ask for fewer tokens"
    )
    return Refusal(entry.request_id, "never_fits", text)
