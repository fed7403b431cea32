"""From a request for a response to its answer: whole, as events, or in the background."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi import Response
from fastapi.responses import JSONResponse

from penstock.deployments.ingress.core.call import Call, CallContext, ChatPrompt
from penstock.deployments.ingress.core.errors import describe
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import Headers, StreamingAnswer
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.events import RESPONSES, json_bytes
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.numbered import NumberedEvents
from penstock.deployments.ingress.http.responses.draft import ResponseBuilder
from penstock.deployments.ingress.http.responses.items import Message
from penstock.deployments.ingress.http.responses.keeper import Keeper
from penstock.deployments.ingress.http.responses.kept import Kept
from penstock.deployments.ingress.http.responses.requests import ResponsesRequest, parse
from penstock.deployments.ingress.http.responses.store import StoredResponse
from penstock.deployments.ingress.http.template_fields import fitted
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.records import Head
from penstock.workers.request import RequestError

# What the core calls max_tokens and messages.
OWN_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}


class Background(Protocol):
    """What runs responses without a client."""

    async def answer(
        self, prepared: PreparedResponse, journal: CallJournal | None, headers: Headers
    ) -> Response:
        """Begin one; the answer of the client that asked for it. Raises ServiceError."""
        ...

    async def find(self, response_id: str, principal: str, param: str) -> Kept:
        """Raises RequestError not_found, or ServiceError state_unavailable."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Answerer:
    """What all answers of one ingress need."""

    core: RequestCore
    keeper: Keeper
    background: Background
    policy: FieldPolicy | None = None  # of unknown fields; None: they are refused

    async def prepare(
        self, content: bytes, context: CallContext, head: Head | None = None
    ) -> PreparedResponse:
        """Check a body. `head`: of a call that is continued. Raises RequestError, ServiceError."""
        left_out = IgnoredFields(self.policy)
        asked = parse(content, left_out)
        if head is not None:
            before = tuple(orjson.loads(head.before or b"[]"))
        else:
            before = await self._before(asked, context.principal)
            if asked.store:  # a promise that the client insists on
                await self.keeper.check(context.request_id)
        messages = asked.messages(before)
        prompt = self._prompt(asked, messages, left_out)
        params = asked.params(self.core.named(asked.model).sampling_defaults)
        call = Call(prompt, params, asked.options(), context)
        with renamed_fields(OWN_NAMES):
            generation = await self.core.prepare(call)
        return PreparedResponse(self, asked, generation, messages, before, left_out)

    async def count_tokens(self, content: bytes, context: CallContext) -> Response:
        """How many tokens a body's prompt has. Raises RequestError, ServiceError."""
        left_out = IgnoredFields(self.policy)
        asked = parse(content, left_out)
        messages = asked.messages(await self._before(asked, context.principal))
        prompt = self._prompt(asked, messages, left_out)
        with renamed_fields(OWN_NAMES):
            ids = await self.core.prompt_ids(Call(prompt, options=asked.options(), context=context))
        count = {"object": "response.input_tokens", "input_tokens": len(ids)}
        return JSONResponse(count, headers=left_out.text_headers())

    def _prompt(
        self, asked: ResponsesRequest, messages: tuple[Message, ...], left_out: IgnoredFields
    ) -> ChatPrompt:
        known = self.core.named(asked.model).tokenizer.template_variables
        return fitted(asked.prompt(messages), asked.effort, known, left_out)

    def sent(
        self, body: AsyncGenerator[bytes, None] | Any, headers: Headers, *, has_event_ids: bool
    ) -> StreamingAnswer:
        return StreamingAnswer(
            body,
            self.core.metrics.num_errors_returned,
            headers=headers,
            has_event_ids=has_event_ids,
            error_format=RESPONSES,
        )

    async def _before(self, asked: ResponsesRequest, principal: str) -> tuple[Message, ...]:
        """The conversation that a request goes on from."""
        if asked.previous_response_id is None:
            return ()
        param = "previous_response_id"
        kept = await self.background.find(asked.previous_response_id, principal, param)
        if kept.status not in ("completed", "incomplete"):
            raise RequestError(f"the response to go on from is {kept.status}", param=param)
        return kept.messages


@dataclass(frozen=True, slots=True, eq=False)
class PreparedResponse:
    """A checked request: a PreparedCall of journalled.py."""

    answerer: Answerer
    asked: ResponsesRequest
    generation: Generation
    messages: tuple[Message, ...]
    conversation: tuple[Message, ...]  # before this request
    left_out: IgnoredFields

    @property
    def streams(self) -> bool:
        return bool(self.asked.stream)

    @property
    def is_background(self) -> bool:
        return bool(self.asked.background)

    @property
    def before(self) -> bytes:
        return json_bytes(list(self.conversation)) if self.conversation else b""

    async def answer(self, journal: CallJournal | None, headers: Headers) -> Response:
        """With a `journal` its events have ids. Raises RequestError or ServiceError."""
        headers = [*headers, *self.left_out.headers()]
        if self.is_background:
            return await self.answerer.background.answer(self, journal, headers)
        numbered = NumberedEvents.of(journal, self.generation)
        entry = self.entry(journal)
        answer = (
            self._events(entry, journal, numbered) if self.streams else self._body(entry, journal)
        )
        return self.answerer.sent(answer, headers, has_event_ids=journal is not None)

    def entry(self, journal: CallJournal | None = None, head: Head | None = None) -> StoredResponse:
        """The response as it begins. `head`: where there is no journal to write."""
        asked, context = self.asked, self.generation.call.context
        head = head if journal is None else journal.head
        draft = ResponseBuilder(
            context.request_id,
            self.answerer.core.model(self.generation.call.options.model).name,
            asked,
            params=self.generation.call.params,
            created_s=None if head is None else head.created_s,
        )
        if journal is not None:
            draft.end_s = lambda: journal.end_s(self.generation)
        return StoredResponse(
            draft,
            context.principal,
            self.messages,
            request_id=context.request_id,
            is_background=self.is_background,
            num_input=len(self.messages),
            texts=(
                asked.instructions or "",
                json.dumps(asked.echoed_fields()),
                *itertools.chain(*(asked.metadata or {}).items()),
            ),
            frames=[] if asked.background and asked.stream else None,
        )

    def failed(self, entry: StoredResponse, error: Exception) -> list[dict[str, Any]]:
        """The last events of a response that cannot be finished."""
        num_errors_returned = self.answerer.core.metrics.num_errors_returned
        return entry.draft.fail(describe(error, entry.request_id, num_errors_returned))

    async def _body(self, entry: StoredResponse, journal: CallJournal | None) -> dict[str, Any]:
        async with aclosing(self.answerer.core.run(self.generation, 0, journal)) as pieces:
            async for _, piece in pieces:
                entry.draft.add(piece)
        await self._keep(entry)
        return entry.draft.body()

    async def _events(
        self, entry: StoredResponse, journal: CallJournal | None, numbered: NumberedEvents
    ) -> AsyncGenerator[bytes, None]:
        """The answer for a client that waits for it; once it has begun, failures are events."""
        draft, has_begun = entry.draft, False
        try:
            async with aclosing(self.answerer.core.run(self.generation, 0, journal)) as pieces:
                async for _, piece in pieces:
                    numbered.count(piece)
                    events = [] if has_begun else draft.created()
                    has_begun = True
                    events += draft.add(piece)
                    if draft.is_done:
                        await self._keep(entry)
                        events[-1]["response"] = draft.body()
                    for frame in numbered.frames(events):
                        yield frame
        except Exception as error:
            if not has_begun:
                raise
            for frame in NumberedEvents.unnamed(self.failed(entry, error)):
                yield frame

    async def _keep(self, entry: StoredResponse) -> None:
        """Unless the client does not want it; the response says where it could not be kept."""
        if self.asked.store is not False and not await self.answerer.keeper.keep(entry):
            entry.draft.is_not_stored()
