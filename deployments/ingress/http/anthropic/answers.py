"""From a request for a message to its answer: whole, or as events that can be continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from penstock.deployments.ingress.core.call import Call, CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.anthropic.rendering import MessageRenderer
from penstock.deployments.ingress.http.anthropic.requests import MessagesRequest, parse
from penstock.deployments.ingress.http.asgi import Headers, StreamingAnswer
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.events import ANTHROPIC
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.numbered import NumberedEvents
from penstock.deployments.ingress.http.template_fields import fitted
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.records import Head
from penstock.workers.request import FinishReason, RequestError


class MessagesEndpoint:
    """The Endpoint of journalled.py at /v1/messages."""

    def __init__(self, core: RequestCore, policy: FieldPolicy):
        self._core, self._policy = core, policy

    async def prepare(
        self, content: bytes, context: CallContext, head: Head | None = None
    ) -> PreparedMessage:
        """Check a body. Raises RequestError or ServiceError."""
        left_out = IgnoredFields(self._policy)
        body = parse(MessagesRequest, content, left_out)
        runtime = self._core.named(body.model)
        known = runtime.tokenizer.template_variables
        prompt = fitted(body.prompt(), body.effort, known, left_out)
        call = Call(prompt, body.params(runtime.sampling_defaults), body.options(), context)
        with renamed_fields({"stop": "stop_sequences"}):
            generation = await self._fitting(call, left_out)
        return PreparedMessage(
            self._core, generation, bool(body.stream), left_out, body.hides_thinking
        )

    async def _fitting(self, call: Call, left_out: IgnoredFields) -> Generation:
        """Agents ask for as many tokens as the largest models give: here they get what is left of
        the context. Raises RequestError or ServiceError."""
        try:
            return await self._core.prepare(call)
        except RequestError as error:
            is_too_many = (error.code, error.param) == ("context_length_exceeded", "max_tokens")
            if not (is_too_many and left_out.ignores_unknown):
                raise
        left_out.add("max_tokens")
        params = replace(call.params, max_tokens=None)
        return await self._core.prepare(replace(call, params=params))

    async def attached(self, *_: object) -> None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMessage:
    """A checked request: a PreparedCall of journalled.py."""

    core: RequestCore
    generation: Generation
    streams: bool
    left_out: IgnoredFields
    hides_thinking: bool = False
    is_background = False
    before = b""

    async def answer(
        self, journal: CallJournal | None = None, headers: Headers | None = None
    ) -> StreamingAnswer:
        """With a `journal` its events have ids. Raises RequestError."""
        call = self.generation.call
        renderer = MessageRenderer(
            call.context.request_id,
            self.core.model(call.options.model).name,
            hides_thinking=self.hides_thinking,
        )
        numbered = NumberedEvents.of(journal, self.generation)
        return StreamingAnswer(
            self._events(renderer, journal, numbered)
            if self.streams
            else self._message(renderer, journal),
            self.core.metrics.num_errors_returned,
            headers=[*(headers or ()), *self.left_out.headers()],
            has_event_ids=journal is not None,
            error_format=ANTHROPIC,
        )

    async def _message(
        self, renderer: MessageRenderer, journal: CallJournal | None
    ) -> dict[str, Any]:
        async with aclosing(self.core.run(self.generation, 0, journal)) as pieces:
            async for _, piece in pieces:
                _refuse_aborted(piece.finish_reason)
                renderer.add(piece, self.generation.usage)
                if piece.finish_reason is not None:
                    return renderer.whole(piece)
        raise ServiceError("worker_lost")

    async def _events(
        self, renderer: MessageRenderer, journal: CallJournal | None, numbered: NumberedEvents
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.core.run(self.generation, 0, journal)) as pieces:
            async for _, piece in pieces:
                _refuse_aborted(piece.finish_reason)
                numbered.count(piece)
                events = renderer.add(piece, self.generation.usage)
                if frames := b"".join(numbered.frames(events)):
                    yield frames


def _refuse_aborted(reason: FinishReason | None) -> None:
    """Their API has no stop_reason for an answer that was ended from outside."""
    if reason is FinishReason.ABORT:
        raise ServiceError("internal_error")
