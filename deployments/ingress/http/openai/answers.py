"""From the body of a request to its Call, and from the pieces of its answers to events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.deployments.ingress.core.call import Call, CallContext, TokenUsage
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import SCORE_BYTES, Generation
from penstock.deployments.ingress.core.logprobs import DecodedLogprob, num_listed_tokens
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.core.validation import check_num_scores
from penstock.deployments.ingress.http.asgi import Headers, StreamingAnswer
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.events import server_sent
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.openai.rendering import ChatRenderer, CompletedChoice
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    parse,
)
from penstock.deployments.ingress.http.template_fields import fitted
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.received import Delivery
from penstock.deployments.ingress.journal.records import Head

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A checked request: its body, its first call, and one generation for each choice.

    `left_out`: of the body.
    """

    body: ChatCompletionRequest | CompletionRequest
    call: Call
    generations: list[Generation]
    left_out: IgnoredFields


@dataclass(frozen=True, slots=True, eq=False)
class JournalledCall:
    """A PreparedCall of journalled.py over a checked request."""

    core: RequestCore
    request: Prepared
    is_background = False
    before = b""

    @property
    def streams(self) -> bool:
        return bool(self.request.body.stream)

    async def answer(self, journal: CallJournal | None, headers: Headers) -> StreamingAnswer:
        return answer(self.core, self.request, journal, headers)


class JournalledEndpoint:
    """The Endpoint of journalled.py at `path`."""

    def __init__(self, core: RequestCore, path: str, policy: FieldPolicy | None):
        self._core, self._path, self._policy = core, path, policy

    async def prepare(
        self, content: bytes, context: CallContext, head: Head | None
    ) -> JournalledCall:
        left_out = IgnoredFields(self._policy)
        request = await prepared(self._core, self._path, content, context, left_out)
        return JournalledCall(self._core, request)

    async def attached(self, *_: object) -> None:
        return None


async def prepared(
    core: RequestCore, path: str, content: bytes, context: CallContext, left_out: IgnoredFields
) -> Prepared:
    """Check the body of a request to `path`. Raises RequestError or ServiceError."""
    if path == CHAT_PATH:
        return await _prepared_chat(core, content, context, left_out)
    return await _prepared_completion(core, content, context, left_out)


async def _prepared_chat(
    core: RequestCore, content: bytes, context: CallContext, left_out: IgnoredFields
) -> Prepared:
    body = parse(ChatCompletionRequest, content, left_out)
    runtime = core.named(body.model)
    known = runtime.tokenizer.template_variables
    prompt = fitted(body.prompt(), body.effort, known, left_out)
    call = Call(prompt, body.params(runtime.sampling_defaults), body.options(), context)
    is_newer_name = body.max_completion_tokens is not None
    with renamed_fields({"max_tokens": "max_completion_tokens"} if is_newer_name else {}):
        generations = await core.prepare_choices(call, body.num_choices)
    return Prepared(body, call, generations, left_out)


async def _prepared_completion(
    core: RequestCore, content: bytes, context: CallContext, left_out: IgnoredFields
) -> Prepared:
    body = parse(CompletionRequest, content, left_out)
    prompts, options = body.prompts(), body.options()
    params = body.params(core.named(body.model).sampling_defaults)
    generations = []
    for i, prompt in enumerate(prompts):
        call = Call(prompt, params, options, context.of_prompt(i, len(prompts)))
        generations += await core.prepare_choices(call, body.num_choices)
        if len(prompts) > 1:
            check_num_scores(call, sum(each.num_prompt_scores for each in generations))
    return Prepared(body, Call(prompts[0], params, options, context), generations, left_out)


def answer(
    core: RequestCore,
    request: Prepared,
    journal: CallJournal | None = None,
    headers: Headers | None = None,
) -> StreamingAnswer:
    """The answer, as events or as one body. With a `journal` its events have ids.

    Raises RequestError if a client that continues has more choices than there are.
    """
    body, call, generations = request.body, request.call, request.generations
    renderer = ChatRenderer(
        call.context.request_id,
        core.model(call.options.model).name,
        is_chat=isinstance(body, ChatCompletionRequest),
        shows_usage=body.wants_usage_chunk,
        running=[each.usage for each in generations] if body.wants_running_usage else (),
        hides_reasoning=body.hides_reasoning,
        shows_logprobs=call.params.logprobs is not None,
        prompts=[each.request.prompt_ids for each in generations] if body.return_token_ids else (),
        created_s=None if journal is None else journal.head.created_s,
    )
    delivery = None if journal is None else journal.delivery(generations)
    make = _events if body.stream else _whole
    return StreamingAnswer(
        make(core, generations, renderer, journal, delivery),
        core.metrics.num_errors_returned,
        headers=[*(headers or ()), *request.left_out.headers()],
        has_event_ids=journal is not None,
    )


async def _whole(
    core: RequestCore,
    generations: Sequence[Generation],
    renderer: ChatRenderer,
    journal: CallJournal | None,
    _: Delivery | None,
) -> dict[str, Any]:
    choices = [CompletedChoice() for _ in generations]
    with core.open_calls.holding() as hold:
        async with aclosing(core.run_many(generations, journal)) as pieces:
            async for index, piece in pieces:
                if piece.logprobs:
                    _hold_scores(hold, piece.logprobs)
                choices[index].add(piece)
        size = sum(choice.size for choice in choices)
        return await run_off_loop_if_large(size, renderer.whole, choices)


def _hold_scores(hold: Callable[[int], None], scores: Sequence[DecodedLogprob]) -> None:
    """A stream passes its scores on; a whole answer keeps them all. Raises ServiceError."""
    try:
        hold(SCORE_BYTES * num_listed_tokens(scores))
    except ServiceError as refusal:
        raise ServiceError(
            refusal.code,
            "the scores of this answer do not fit the memory for open requests (max_open_mb): send "
            "stream: true, or ask for fewer top_logprobs",
            retry_after_s=refusal.retry_after_s,
        ) from None


async def _events(
    core: RequestCore,
    generations: Sequence[Generation],
    renderer: ChatRenderer,
    journal: CallJournal | None,
    delivery: Delivery | None,
) -> AsyncGenerator[bytes, None]:
    usages: list[TokenUsage] = []
    opened: set[int] = set()
    event_id: str | None = None
    async with aclosing(core.run_many(generations, journal)) as pieces:
        async for index, piece in pieces:
            renderer.count(index, piece)
            if piece.usage is not None:
                usages.append(piece.usage)
            if delivery is not None:
                if not delivery.is_new(index, piece):
                    opened.add(index)
                    renderer.skip(index)
                    continue
                event_id = delivery.event_id()
            event = b""
            if renderer.is_chat and index not in opened:
                opened.add(index)
                event = server_sent(renderer.opening(index))
            if piece.logprobs or piece.prompt_logprobs:
                size = num_listed_tokens(piece.logprobs, piece.prompt_logprobs)
                event += await run_off_loop_if_large(size, renderer.events, index, piece, event_id)
            else:
                event += renderer.events(index, piece, event_id)
            if event:
                yield event
    if renderer.shows_usage:
        yield server_sent(renderer.usage_chunk(usages))
