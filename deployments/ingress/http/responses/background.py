"""Responses that go on without a client, on any ingress: begun, followed, taken over, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from fastapi import Response
from fastapi.responses import JSONResponse

from penstock.deployments.ingress.core.errors import CATALOGUE, ServiceError
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import Headers
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.journalled import continued_context
from penstock.deployments.ingress.http.numbered import NumberedEvents
from penstock.deployments.ingress.http.responses.answers import Answerer, PreparedResponse
from penstock.deployments.ingress.http.responses.keeper import Keeper
from penstock.deployments.ingress.http.responses.kept import Kept
from penstock.deployments.ingress.http.responses.store import StoredResponse
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.journal.received import Delivery
from penstock.workers.request import RequestError

log = logging.getLogger("penstock.background")


class BackgroundResponses:
    """Those of one ingress; with `journals`, those of all ingresses that share their store."""

    def __init__(
        self,
        core: RequestCore,
        keeper: Keeper,
        journals: Journals | None,
        policy: FieldPolicy | None = None,
    ):
        """`policy`: of unknown fields; None: they are refused."""
        self._core = core
        self._keeper = keeper
        self._journals = journals
        self._num_starting = 0
        self._running: dict[str, CallJournal] = {}  # by the call's id
        self._answerer = Answerer(core, keeper, self, policy)

    @property
    def answerer(self) -> Answerer:
        return self._answerer

    async def find(self, response_id: str, principal: str, param: str) -> Kept:
        """A response; one whose ingress has ended goes on here.

        Raises RequestError not_found, or ServiceError state_unavailable.
        """
        kept = await self._keeper.find(response_id, principal)
        is_elsewhere = kept is not None and kept.is_running and kept.version is not None
        if kept is not None and is_elsewhere and await self._claimed(kept.request_id):
            await self.adopt(kept.request_id)
            kept = await self._keeper.find(response_id, principal)
        if kept is None:
            shown = ascii(response_id[:100])
            raise RequestError(
                f"there is no response {shown} here (any more)", param=param, code="not_found"
            )
        return kept

    async def answer(
        self, prepared: PreparedResponse, journal: CallJournal | None, headers: Headers
    ) -> Response:
        """Begin a response; its first state, or its stream. Raises ServiceError."""
        self._keeper.local.check_room(
            self._num_starting, prepared.generation.call.context.principal
        )
        entry = prepared.entry(journal)
        numbered = NumberedEvents.of(journal, prepared.generation)
        self._num_starting += 1
        try:
            if self._journals is not None:
                await self._keeper.write_running(entry)
                try:
                    await self._journals.background.add(entry.request_id)
                except ServiceError:  # nothing would end it
                    with contextlib.suppress(ServiceError):
                        await self._keeper.remove(Kept.of(entry))
                    raise
        finally:
            self._num_starting -= 1
        self._start(prepared, entry, journal, numbered)
        if prepared.streams:
            return self._answerer.sent(entry.follow(-1), headers, has_event_ids=journal is not None)
        return JSONResponse(entry.draft.body(), headers=_as_text(headers))

    async def stream(self, kept: Kept, after: int, headers: Headers) -> Response:
        """The events after number `after`. Raises RequestError or ServiceError."""
        entry = self._keeper.local.get(str(kept.body["id"]), kept.principal)
        has_ids = self._journals is not None
        if entry is not None:
            frames = entry.follow(after)
            return self._answerer.sent(frames, headers, has_event_ids=has_ids)
        assert self._journals is not None, "without a store all responses are here"
        head = await self._journals.head(kept.request_id, kept.principal)
        # The ingress that generates it keeps the deadline; what it made can be read later, too.
        about = replace(continued_context(kept.request_id, head), deadline_s=None)
        prepared = await self._answerer.prepare(head.body, about, head)
        return self._answerer.sent(
            self._followed(prepared, prepared.entry(head=head), after),
            headers,
            has_event_ids=has_ids,
        )

    async def cancel(self, kept: Kept) -> None:
        """End a response that runs, wherever it does, and wait until it has ended.

        Raises ServiceError state_unavailable.
        """
        entry = self._keeper.local.get(str(kept.body["id"]), kept.principal)
        if entry is None and kept.is_running and self._journals is not None:
            if await self._journals.background.claim(kept.request_id, from_living=True):
                entry = await self.adopt(kept.request_id, is_cancelled=True)
        elif entry is not None and entry.is_running:
            self._core.cancel(entry.request_id, entry.principal)
        if entry is not None and entry.task is not None and entry.is_running:
            await asyncio.wait((entry.task,))

    async def delete(self, kept: Kept) -> None:
        """Forget a response; one that still runs is cancelled. Raises ServiceError."""
        await self.cancel(kept)
        await self._keeper.remove(kept)
        if self._journals is not None:
            await self._journals.forget(kept.request_id)

    async def adopt(self, call_id: str, *, is_cancelled: bool = False) -> StoredResponse | None:
        """Go on with a response that this ingress has claimed; None: there is nothing to do.

        `is_cancelled`: it ends with what its journal has. Raises ServiceError.
        """
        assert self._journals is not None
        kept = await self._keeper.of_call(call_id)
        if kept is None or not kept.is_running:
            self._journals.background.remove(call_id)
            return None
        try:
            head = await self._journals.head(call_id, None)
            journal = await self._journals.resume(call_id, head)
            about = continued_context(call_id, head)
            prepared = await self._answerer.prepare(head.body, about, head)
        except RequestError as error:  # its journal has expired, or this server would refuse it
            await self._give_up(kept, error)
            return None
        except ServiceError as error:
            if error.code != "deadline_exceeded":
                raise
            await self._give_up(kept, error)
            return None
        journal.is_cancelled = is_cancelled
        entry = prepared.entry(journal)
        entry.version = kept.version
        self._start(prepared, entry, journal, NumberedEvents.of(journal, prepared.generation))
        return entry

    def on_lost(self, call_id: str) -> None:
        if call_id in self._running:
            self._running[call_id].end("resumed_elsewhere")

    async def stop(self) -> None:
        """End all responses here, so that other ingresses continue them. Never fails."""
        assert self._journals is not None
        tasks = [entry.task for entry in self._keeper.local.running() if entry.task is not None]
        for journal in self._running.values():
            journal.end("resumed_elsewhere")
        if tasks:
            await asyncio.wait(tasks)
        await self._journals.flush()

    def _start(
        self,
        prepared: PreparedResponse,
        entry: StoredResponse,
        journal: CallJournal | None,
        numbered: NumberedEvents,
    ) -> None:
        """Nothing is awaited here, so that no other call comes between."""
        entry.tell(list(numbered.frames(entry.draft.created())))
        if journal is not None:
            self._running[entry.request_id] = journal
        entry.task = asyncio.create_task(self._run(prepared, entry, journal, numbered))
        self._keeper.local.put(entry)

    async def _run(
        self,
        prepared: PreparedResponse,
        entry: StoredResponse,
        journal: CallJournal | None,
        numbered: NumberedEvents,
    ) -> None:
        """Generate a response, whether or not a client waits for it."""
        draft = entry.draft
        try:
            async with aclosing(self._core.run(prepared.generation, 0, journal)) as pieces:
                async for _, piece in pieces:
                    numbered.count(piece)
                    was_queued = draft.status == "queued"
                    entry.tell(list(numbered.frames(draft.add(piece))))
                    if was_queued and not draft.is_done:
                        await self._tell_others(entry)
        except Exception as error:
            if isinstance(error, ServiceError) and error.code == "resumed_elsewhere":
                entry.is_lost = True
            else:
                entry.tell(list(NumberedEvents.unnamed(prepared.failed(entry, error))))
        finally:
            self._running.pop(entry.request_id, None)
        if entry.is_lost:
            self._keeper.local.remove(entry)
            entry.tell([])
        elif self._keeper.local.get(draft.id, entry.principal) is entry:
            await self._keeper.finish(entry)
            if self._journals is not None:
                self._journals.background.remove(entry.request_id)

    async def _tell_others(self, entry: StoredResponse) -> None:
        """That a response is no longer queued; they see it in the end, too."""
        with contextlib.suppress(ServiceError):
            await self._keeper.write_running(entry)

    async def _followed(
        self, prepared: PreparedResponse, entry: StoredResponse, after: int
    ) -> AsyncGenerator[bytes, None]:
        """The events of a response that another ingress generates."""
        assert self._journals is not None
        call_id, draft = entry.request_id, entry.draft

        async def outcome() -> str | None:
            kept = await self._keeper.of_call(call_id)
            if kept is not None and kept.is_running:
                return None
            return "failed" if kept is None else kept.status

        followed = self._journals.followed(call_id, outcome)
        draft.end_s = followed.end_s
        numbered = NumberedEvents(Delivery(call_id, 1), after)
        for frame in numbered.frames(draft.created()):
            yield frame
        try:
            async with aclosing(self._core.run(prepared.generation, 0, followed)) as pieces:
                async for _, piece in pieces:
                    numbered.count(piece)
                    for frame in numbered.frames(draft.add(piece)):
                        yield frame
        except ServiceError as error:
            kept = None if error.code != "worker_lost" else await self._keeper.of_call(call_id)
            if kept is None or kept.is_running:
                raise
            for frame in NumberedEvents.unnamed(draft.end_with(kept.body)):
                yield frame

    async def _claimed(self, call_id: str) -> bool:
        return self._journals is not None and await self._journals.background.claim(call_id)

    async def _give_up(self, kept: Kept, error: RequestError | ServiceError) -> None:
        """End a response that cannot be continued."""
        assert self._journals is not None
        why = CATALOGUE[error.code].message if isinstance(error, ServiceError) else str(error)
        failure = {"code": "server_error", "message": why, "type": error.code}
        failed = replace(kept, body={**kept.body, "status": "failed", "error": failure})
        await self._journals.responses.put(kept.request_id, failed.value(), expect=kept.version)
        self._journals.background.remove(kept.request_id)


def _as_text(headers: Headers) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}
