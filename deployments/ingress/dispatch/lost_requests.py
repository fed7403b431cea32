"""What becomes of requests whose worker was lost: they continue, unless one of them ends workers.

A request that ends its worker does so at the same place each time; a request beside it is innocent.
Each loss of a worker that computed it is a strike, and a new token takes all strikes back. A
request that has three, and more than any other on its worker, is refused. (Two would be enough to
find it, and too few for chance: a long prompt that is computed again may meet two kills.) Where
several have the most strikes, half of those are tried first, and all others of that worker wait
until each of the half has emitted a token, has ended, or was lost again: so the request at fault
alone has the most strikes after log2(n) workers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest, Trial
from penstock.deployments.ingress.dispatch.shared_refusals import REMEMBER_S, SharedRefusals
from penstock.workers.stats import Histogram

log = logging.getLogger("penstock.channel")

STRIKES = 3  # without a new token
MOST_STRIKES = 12  # then it is refused, whatever else ran there
MAX_REMEMBERED = 1024
PAUSE_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)


class LostRequests:
    """Strikes and trials of one ingress. Lives on one event loop; the caller passes the time."""

    def __init__(self) -> None:
        self.num_continued = 0
        self.num_refused = 0
        self.pauses = Histogram(PAUSE_BOUNDS)  # seconds without a worker
        self.shared: SharedRefusals | None = None  # None: there is no state store
        self.model = ""  # of several, the name of these requests' model
        self._refused: dict[bytes, float] = {}  # by fingerprint: until when

    def lost(self, calls: Sequence[InFlightRequest], epoch: int, *, has_others: bool) -> None:
        """The worker of `calls` is lost. `has_others`: other ingresses had requests there."""
        for call in calls:
            if call.trial is not None:
                call.trial.passed(call)
        calls = [call for call in calls if call.is_accepted]  # others only waited there
        if not calls:
            return
        for call in calls:
            if call.num_emitted > call.struck_at:
                call.strikes.clear()
            call.strikes.append(epoch)
            call.struck_at = call.num_emitted
        most = max(len(call.strikes) for call in calls)
        if most < 2:
            return
        worst = [call for call in calls if len(call.strikes) == most]
        enough = len(worst) == 1 and most >= STRIKES + has_others
        for call in worst:
            call.is_suspect = enough or most >= MOST_STRIKES
        half = (len(worst) + 1) // 2
        first = Trial(set(worst[:half]))
        for call in calls:
            if call in first.left:
                call.trial, call.waits_for = first, None
            else:
                call.waits_for = first

    def acquit(self, call: InFlightRequest, lives: Callable[[int], bool]) -> bool:
        """Whether a suspect may continue: a worker that it was lost with lives, by its epoch."""
        call.strikes = [epoch for epoch in call.strikes if not lives(epoch)]
        call.is_suspect = call.is_suspect and len(call.strikes) >= STRIKES
        return not call.is_suspect

    async def refuse(self, call: InFlightRequest, now: float) -> None:
        """Remember the request, here and in the state store, for clients that send it again."""
        self.num_refused += 1
        log.warning(
            "request %s is refused: %d workers ended while they computed it",
            call.request.request_id,
            len(call.strikes),
        )
        for old in [each for each, until in self._refused.items() if until <= now]:
            del self._refused[old]
        mark = fingerprint(call.admission, self.model)
        if len(self._refused) < MAX_REMEMBERED:
            self._refused[mark] = now + REMEMBER_S
        if self.shared is not None:
            await self.shared.add(mark)

    async def is_refused(self, admission: AdmissionRequest, now: float) -> bool:
        """Whether the same request ended workers in the last ten minutes."""
        asks = self.shared is not None and self.shared.asks()
        if not (self._refused or asks):
            return False
        mark = fingerprint(admission, self.model)
        if self._refused.get(mark, 0.0) > now:
            return True
        return asks and self.shared is not None and await self.shared.has(mark)

    def continued(self, call: InFlightRequest, now: float) -> None:
        """The first token after a loss is here."""
        if call.lost_s is not None:
            self.num_continued += 1
            self.pauses.observe(now - call.lost_s)
            call.lost_s = None


def fingerprint(admission: AdmissionRequest, model: str = "") -> bytes:
    """Equal for equal prompts and parameters of one tenant; the seed may have been ours.

    `model`: of several models, the request's.
    """
    request = admission.request
    params = replace(request.params, seed=None, prompt_logprobs=None)
    content: tuple[object, ...] = (admission.features.tenant, request.prompt_ids, params)
    content = (model, *content) if model else content
    content = (request.adapter, *content) if request.adapter else content
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()
