"""One request that a worker runs: buffered deltas, and when to wake the consumer.

Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.workers.channel.delta_size import num_bytes
from penstock.workers.channel.peer import joined
from penstock.workers.request import Delta, FinishReason, Request

# Each message to a client costs the ingress CPU time, whatever its size. Where a link has many
# streams of fast steps, they share MESSAGES_PER_S, and each gets a message at least every GATHER_S.
# A message does not wait for a token that would come too late, and a first or last token never
# waits.
MESSAGES_PER_S = 640  # of a link: some 10 % of a core
GATHER_S = 0.05
FEW_CALLS = 8  # requests of a link that cost little CPU, and are never held back


# Of memory that one stream's unread tokens and logprobs may take: 29,000 tokens, or 400 with twenty
# alternatives each. What the systems' buffers hold, usually some MB, comes before it.
MAX_UNREAD_BYTES = 1 << 20

TOO_SLOW = "client_too_slow"
LOST = "lost"  # an error code that no client sees: the pool sends the request to another worker


def nothing_to_cancel() -> None:
    """No worker runs the request."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request at a worker: how to cancel it, and what its workers have sent so far.

    When its worker is lost, it continues on another one after the tokens in `emitted`.
    """

    admission: AdmissionRequest
    num_expected: int  # tokens still to compute, prompt included, as far as one can guess
    pending: list[Delta] = field(default_factory=list)  # not taken yet: one, and perhaps an error
    woken_s: float = 0.0  # when its reader was last woken
    cancel: Callable[[], None] = nothing_to_cancel  # at the worker that runs it
    stream_id: int = 0
    # Tokens that have arrived, whether or not the client has read them.
    emitted: array[int] = field(default_factory=lambda: array("i"))
    num_before: int = 0  # of those, from workers that were lost
    computes: str = ""  # WorkerInfo.computes of the worker that made its last tokens
    is_accepted: bool = False  # its worker computes it
    num_declined: int = 0  # times that a worker had no room
    lost_s: float | None = None  # since when it has no worker, after its worker was lost
    strikes: list[int] = field(default_factory=list)  # see lost_requests.py
    struck_at: int = 0  # tokens that it had emitted at the last strike
    is_suspect: bool = False  # refused unless one of its workers turns out to live
    trial: Trial | None = None  # that it is part of
    waits_for: Trial | None = None
    num_unread_bytes: int = 0  # of what is pending, by request.num_bytes
    _is_notified: bool = False  # that there is something pending
    _reader: asyncio.Future[None] | None = None  # set while the reader waits

    def is_too_much(self, delta: Delta) -> bool:
        """Whether the reader is busy with something else, and has left too much unread for
        `delta` to be added."""
        if self._reader is not None or not self.pending:
            return False
        return self.num_unread_bytes + num_bytes(delta) > MAX_UNREAD_BYTES

    def add(self, delta: Delta) -> None:
        """Add `delta` to the pending ones; tokens before an error stay apart."""
        self.num_unread_bytes += num_bytes(delta)
        if self.pending and delta.finish_reason is not FinishReason.ERROR:
            joined(self.pending[-1], delta)
        else:
            self.pending.append(delta)

    @property
    def request(self) -> Request:
        return self.admission.request

    @property
    def num_emitted(self) -> int:
        return len(self.emitted)

    @property
    def is_begun(self) -> bool:
        """Whether the worker that it is on has sent a token."""
        return len(self.emitted) > self.num_before

    @property
    def keeps_to_model(self) -> bool:
        """Whether its answer has tokens of a model: from here, or from an ingress before this."""
        return bool(self.emitted) or self.admission.computes != ""

    def fits(self, computes: str) -> bool:
        """Whether a worker that computes so would not change an answer that has begun."""
        return not self.keeps_to_model or computes == self.computes

    @property
    def num_to_prefill(self) -> int:
        """Tokens that its worker computes before the first new one."""
        return len(self.request.prompt_ids) + len(self.request.emitted_ids)

    def continue_after_emitted(self) -> None:
        """Make it a request that another worker continues after the emitted tokens.

        What the client has got once is not asked for again.
        """
        new = self.emitted[self.num_before :]
        request = self.request
        params = request.params
        if self.emitted and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        emitted_ids = (*request.emitted_ids, *new)
        request = replace(request, params=params, emitted_ids=emitted_ids, is_continued=True)
        self.admission = replace(self.admission, request=request)
        self.num_expected += self.num_to_prefill if self.is_begun else 0
        self.num_before, self.is_accepted = len(self.emitted), False

    def note(self, event: str) -> None:
        """Add an event to the request's trace, if it has one."""
        if self.admission.trace is not None:
            self.admission.trace.note(event, self.num_emitted)

    def presented(self, delta: Delta) -> Delta:
        """`delta` as the client gets it: the first worker said how the prompt was computed."""
        delta.computes = self.computes
        if delta.events and self.admission.trace is not None:
            for event in delta.events:
                self.admission.trace.on_worker(event)
        if self.num_before:
            delta.times, delta.num_cached_tokens = None, 0
        return delta

    def fail(self, code: str) -> None:
        self.cancel = nothing_to_cancel
        self.add(Delta(self.request.request_id, [], FinishReason.ERROR, error=code))
        self.tell(self.woken_s)

    def tell(self, now_s: float) -> None:
        """Wake the reader. (An asyncio.Event does the same for many readers, at twice the cost.)"""
        self.woken_s = now_s
        self._is_notified = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> Delta:
        """All that has come since the last time; waits until there is something."""
        if not self._is_notified:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        delta = self.pending.pop(0)
        self.num_unread_bytes = 0  # only an error can be left
        self._is_notified = bool(self.pending)
        return delta


@dataclass(slots=True, eq=False)
class Trial:
    """Requests that are tried apart from others: one of them may end its worker."""

    left: set[InFlightRequest]  # that have not emitted a token yet
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def passed(self, call: InFlightRequest) -> None:
        """The request has emitted a token, has ended, or was lost again."""
        call.trial = None
        self.left.discard(call)
        if not self.left:
            self.is_over.set()


class Coalescer:
    """Decides which requests of one link wait to share a message; `end` wakes all that wait."""

    def __init__(self, end: Callable[[float], None]):
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._stepped_s = 0.0
        self._step_s = 0.0  # from one step to the next, of late

    def steps(self, now_s: float) -> None:
        """A step has come."""
        last_s = min(now_s - self._stepped_s, GATHER_S)
        self._stepped_s = now_s
        self._step_s += 0.25 * (last_s - self._step_s)

    def holds(self, call: InFlightRequest, num_calls: int, now_s: float) -> bool:
        """Whether what came for `call` waits for more, or for `end`, whichever is first."""
        until_s = call.woken_s + min(num_calls / MESSAGES_PER_S, GATHER_S)
        # A step may come a little sooner than usual.
        if num_calls <= FEW_CALLS or now_s + 0.8 * self._step_s >= until_s:
            return False
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(until_s, self._on_time)
        return True

    def _on_time(self) -> None:
        self._timer = None
        self._end(asyncio.get_running_loop().time())
