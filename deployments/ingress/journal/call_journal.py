"""`CallJournal`: one call's tokens, first those that are kept, then those that workers make."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.backend import TokenBackend
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.journal.received import Delivery, Received
from penstock.deployments.ingress.journal.records import Head, Kept
from penstock.workers.request import Delta, FinishReason


class CallJournal:
    """A Recorder of the request core. Made by Journals; lives on its event loop."""

    generates = True

    def __init__(
        self,
        call_id: str,
        head: Head,
        on_record: Callable[[CallJournal, Delta], None],
        *,
        kept: Mapping[str, Kept] | None = None,
        next_index: int = 0,
        fence: int = 0,
        received: tuple[Received, ...] = (),
        after: int = -1,
    ):
        """`kept`: what is kept of each answer, by its request id, where the call is continued.

        `next_index`: of the next record. `received`: what the client has of each answer; `after`:
        the number of the last event that it has, where events are numbered.
        """
        self.call_id = call_id
        self.head = head
        self.next_index = next_index
        self.fence = fence
        self.is_kept = False  # another ingress could continue the call
        self.is_resumed = kept is not None
        self.pending: list[Delta] = []  # not encoded yet
        self.unsent: list[bytes] = []  # records that the store has not acknowledged
        self.ended_s = {
            name: each.ended_s for name, each in (kept or {}).items() if each.ended_s is not None
        }
        self.after = after
        self.is_cancelled = False  # it ends with what is kept
        self._kept = {name: each.deltas for name, each in (kept or {}).items()}
        self._computes = {name: each.computes for name, each in (kept or {}).items()}
        self.has_tokens = any(self._kept.values())
        self._by_token = False
        self._on_record = on_record
        self._received = received
        self._positions: dict[str, int] = {}
        self._generations: tuple[Generation, ...] = ()

    def delivery(self, generations: Sequence[Generation], *, by_token: bool = False) -> Delivery:
        """Of the stream to the client; `generations`: the answers of the call, in order.

        `by_token`: each piece of the answer has one token, so that the events are the same at each
        try, however the tokens come. Raises RequestError if the client has more answers than there
        are.
        """
        self._generations, self._by_token = tuple(generations), by_token
        names = (each.request.request_id for each in generations)
        self._positions = {name: each.num_tokens for name, each in zip(names, self._received)}
        return Delivery(self.call_id, len(generations), self._received)

    def end(self, code: str) -> None:
        """End all answers with an error of the catalogue."""
        for each in self._generations:
            each.cancel(code)

    def end_s(self, generation: Generation) -> int:
        """When that answer ended, in seconds of Unix time: the same at each try."""
        name = generation.request.request_id
        if name not in self.ended_s:  # by a stop string, which no worker knows
            self.ended_s[name] = int(time.time())
            self._on_record(self, Delta(name, []))
        return self.ended_s[name]

    async def generate(
        self, admission: AdmissionRequest, backend: TokenBackend
    ) -> AsyncGenerator[Delta, None]:
        """All deltas of one answer; each new one is recorded. Raises what the backend raises.

        None reaches beyond the last token that the client has, if it begins before.
        """
        name, num_tokens = admission.request_id, 0
        position = self._positions.get(name, 0)
        kept = self._kept.get(name, ())
        for delta in kept:
            delta.is_replayed = True
            for part in self._parts(delta, position - num_tokens):
                yield part
            num_tokens += len(delta.token_ids)
        if kept and kept[-1].finish_reason is not None:
            return
        if self.is_cancelled:
            yield Delta(name, [], FinishReason.ABORT)
            return
        computes = self._computes.get(name, "")
        if self.is_resumed:
            admission = replace(self._rest_of(admission, kept), computes=computes)
        async with aclosing(backend.generate(admission)) as deltas:
            async for delta in deltas:
                delta.request_id = name
                if computes:  # it is recorded once
                    delta.computes = ""
                computes = computes or delta.computes
                if kept:  # the first worker said how the prompt was computed
                    delta.times, delta.num_cached_tokens = None, 0
                if delta.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
                    self.has_tokens = True
                    if delta.finish_reason is not None:
                        self.ended_s[name] = int(time.time())
                    self._on_record(self, delta)
                for part in self._parts(delta, position - num_tokens):
                    yield part
                num_tokens += len(delta.token_ids)

    def _parts(self, delta: Delta, num_first: int) -> Iterator[Delta]:
        """`delta`, in two where its first `num_first` tokens are not all or none; by tokens, where
        each has a piece of its own."""
        if self._by_token:
            yield from by_token(delta)
        elif 0 < num_first < len(delta.token_ids):
            yield from _halves(delta, num_first)
        else:
            yield delta

    def _rest_of(self, admission: AdmissionRequest, kept: Sequence[Delta]) -> AdmissionRequest:
        """The rest of an answer, under a name of its own: the first attempt may still run."""
        request = admission.request
        params = replace(request.params, prompt_logprobs=None) if kept else request.params
        request = replace(
            request,
            request_id=f"{request.request_id}~{self.fence}",
            params=params,
            emitted_ids=tuple(token for delta in kept for token in delta.token_ids),
        )
        return replace(admission, request=request)


def by_token(delta: Delta) -> Iterator[Delta]:
    """`delta` as deltas of one token."""
    while len(delta.token_ids) > 1:
        first, delta = _halves(delta, 1)
        yield first
    yield delta


def _halves(delta: Delta, num_first: int) -> tuple[Delta, Delta]:
    first = Delta(
        delta.request_id,
        delta.token_ids[:num_first],
        num_cached_tokens=delta.num_cached_tokens,
        logprobs=delta.logprobs[:num_first],
        prompt_logprobs=delta.prompt_logprobs,
        times=delta.times,
        engine=delta.engine,
        is_replayed=delta.is_replayed,
    )
    rest = replace(
        delta,
        token_ids=delta.token_ids[num_first:],
        logprobs=delta.logprobs[num_first:],
        prompt_logprobs=[],
        times=None,
    )
    return first, rest
