"""Validates calls, runs them on a backend, and returns text: one core for all front ends.

Every cap and check that a client can meet is here, so that no front end can miss one. Imports no
HTTP, gRPC or worker: front ends pass `Call`s in, and a `TokenBackend` makes tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from penstock.deployments.ingress.core.access_log import log_request
from penstock.deployments.ingress.core.admission_request import AdmissionRequest, admission_request
from penstock.deployments.ingress.core.call import Call, ChatPrompt, ServedModel
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.prompts import PromptReader
from penstock.deployments.ingress.core.reasoning import Reasoning
from penstock.deployments.ingress.core.request_metrics import DISCONNECT, RequestMetrics
from penstock.deployments.ingress.core.streams import (
    MAX_INLINE_SIZE,
    Pieces,
    merged,
    run_off_loop_if_large,
)
from penstock.deployments.ingress.core.validation import (
    check_choices,
    check_extras,
    check_ids,
    check_length,
    check_text,
    engine_params,
    nth_choice,
)
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings
from penstock.workers.request import Delta, FinishReason, Request, RequestError
from penstock.workers.text.reasoning import Marks
from penstock.workers.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 4 << 20
MAX_PROMPTS = 64  # prompts of one call
MAX_MODEL_NAME_CHARS = 200


class TokenBackend(Protocol):
    """Turns a request into Deltas: the workers of a cluster, or an engine in this process."""

    def generate(self, admission: AdmissionRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish_reason. Closing the generator cancels the request."""
        ...

    def ready(self) -> bool:
        """Whether a request would be served now."""
        ...


class Learner(Protocol):
    """Learns how long answers become."""

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        """`ended`: "stop", "length" (it was cut) or "cancel"."""


# Of finish reasons. What else ends an answer says nothing about its length.
_ENDED = {
    FinishReason.STOP.value: "stop",
    FinishReason.LENGTH.value: "length",
    FinishReason.ABORT.value: "cancel",
    DISCONNECT: "cancel",
}


class RequestCore:
    """Validates calls, runs them on a backend, and gives text. Lives on one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: TokenBackend,
        *,
        model_name: str,
        vocab_size: int,
        max_model_len: int,
        marks: Marks | None = None,
        contexts: ContextSettings | None = None,
        learner: Learner | None = None,
    ):
        """`learner`: receives the length of each answer; without one, requests carry no features.
        `vocab_size`: the model's; its tokenizer may know fewer tokens. `marks`: of reasoning.
        `contexts`: which context policies requests may choose; None: a worker's defaults."""
        self.tokenizer = tokenizer
        self._backend = backend
        self._model = ServedModel(
            model_name, vocab_size, max_model_len, tokenizer.has_chat_template
        )
        self._contexts = contexts or ContextSettings.of(EngineConfig(), max_model_len)
        self._learner = learner
        self._prompts = PromptReader(tokenizer)
        self._reasoning = Reasoning(marks, tokenizer)
        self._running: dict[str, list[Generation]] = {}  # by the call's id
        self.metrics = RequestMetrics(model_name, max_model_len)

    def ready(self) -> bool:
        """Whether a request would be served now."""
        return self._backend.ready()

    def models(self) -> list[ServedModel]:
        return [self._model]

    def model(self, name: str | None) -> ServedModel:
        """The model of that name. Raises RequestError model_not_found."""
        if name and name != self._model.name:
            shown = ascii(name[:MAX_MODEL_NAME_CHARS])
            raise RequestError(
                f"the model {shown} is not served here; served: {self._model.name}",
                param="model",
                code="model_not_found",
            )
        return self._model

    async def prepare(self, call: Call) -> Generation:
        """Check a call whole and make its prompt token ids. Raises RequestError or ServiceError."""
        start_s = time.monotonic()
        try:
            model = self.model(call.options.model)
            params = engine_params(call)
            params.check(model.vocab_size)
            check_extras(call)
            for stop in call.params.stop:
                check_text(stop, "stop")
            self._contexts.context(params)
            limit = self._contexts.max_total_tokens(params)
            prompt_ids = await self._prompts.ids(call, model, limit)
            if call.options.truncate_prompt_tokens is not None:
                prompt_ids = prompt_ids[-call.options.truncate_prompt_tokens :]
            check_length(len(prompt_ids), params, limit)
            params = self._reasoning.params(call, prompt_ids, params)
            if call.options.bad_words:
                words = await self._prompts.bad_words_ids(call.options.bad_words)
                params = replace(params, bad_words_ids=params.bad_words_ids + words)
                params.check(model.vocab_size)
            if call.context.deadline_s is not None and time.monotonic() >= call.context.deadline_s:
                raise ServiceError("deadline_exceeded")
        except (RequestError, ServiceError) as refusal:
            log_request(call, finish=refusal.code)
            raise
        request = Request(
            call.context.request_id,
            prompt_ids,
            params,
            deadline_s=call.context.deadline_s,
            priority=call.options.priority,
        )
        admission = AdmissionRequest(request)
        if self._learner is not None:
            admission = admission_request(request, call, model.name, self._contexts)
        return self._generation(admission, call, start_s)

    async def prepare_choices(self, call: Call, num_choices: int) -> list[Generation]:
        """`prepare` for `num_choices` answers to one prompt, which is computed once for all.

        Run them with `run_many`. A seed gives each answer draws of its own, the same in each call.
        """
        try:
            check_choices(num_choices)
        except RequestError as refusal:
            log_request(call, finish=refusal.code)
            raise
        first = await self.prepare(call)
        admission, start_s = first.admission, first.times.start_s
        generations = [first]
        for index in range(1, num_choices):
            request = replace(
                first.request,
                request_id=f"{call.context.request_id}.{index}",
                params=nth_choice(first.request.params, index),
            )
            other = replace(admission, request=request)
            generations.append(self._generation(other, call, start_s, first))
        return generations

    async def run(self, generation: Generation, index: int = 0) -> Pieces:
        """The answer in pieces, each with `index`; the last has finish_reason and usage.

        Raises ServiceError if it cannot be finished. Closing this generator drops the request.
        """
        answers = self._running.setdefault(generation.call.context.request_id, [])
        answers.append(generation)
        times, usage = generation.times, generation.usage
        finish = DISCONNECT
        try:
            await self._wait_for_prompt(generation)
            async with aclosing(self._backend.generate(generation.admission)) as deltas:
                while True:
                    delta = await self._next(deltas, generation)
                    times.engine = delta.engine or times.engine
                    work = generation.work_in(delta)
                    if work <= MAX_INLINE_SIZE:  # as it nearly always is: no coroutine for that
                        piece = generation.take(delta)
                    else:
                        piece = await run_off_loop_if_large(work, generation.take, delta)
                    generation.has_begun.set()
                    piece = generation.read_tool_calls(piece)
                    if piece.token_ids:
                        self.metrics.count_tokens(times, delta, len(piece.token_ids), usage)
                    if piece.finish_reason is not None:
                        finish = piece.finish_reason.value
                        if generation.call.context.wants_timings:
                            usage.timings = times.timings(time.monotonic())
                    yield index, piece
                    if piece.finish_reason is not None:
                        return
        except (RequestError, ServiceError) as failure:
            finish = failure.code
            raise
        except Exception:
            finish = "internal_error"
            raise
        finally:
            generation.deadline.close()
            generation.has_begun.set()  # other answers may wait for the prompt
            answers.remove(generation)
            if not answers:
                self._running.pop(generation.call.context.request_id, None)
            self.metrics.count_end(times, finish, usage)
            self._learn(generation, finish)
            log_request(generation.call, finish=finish, generation=generation)

    def run_many(self, generations: Sequence[Generation]) -> Pieces:
        """All answers in parallel, each piece with the index of its generation.

        The first failure ends them all; so does closing this generator.
        """
        if len(generations) == 1:
            return self.run(generations[0])
        return merged([self.run(each, index) for index, each in enumerate(generations)])

    def cancel(self, request_id: str, principal: str = "") -> bool:
        """End a call of this principal; its answers end with ABORT. False: there is none."""
        answers = self._running.get(request_id)
        if not answers or answers[0].call.context.principal != principal:
            return False
        for generation in answers:
            generation.cancel()
        return True

    async def tokenize(
        self, text: str, *, model: str | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of `text`. Raises RequestError."""
        self.model(model)
        check_text(text, "text")
        return await run_off_loop_if_large(
            len(text), self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def prompt_ids(self, call: Call) -> tuple[int, ...]:
        """The prompt of `call` as the model would read it, however long. Raises RequestError."""
        model = self.model(call.options.model)
        return await self._prompts.ids(call, model, model.max_model_len)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool
    ) -> str:
        """The text of `token_ids`. Raises RequestError."""
        check_ids(token_ids, self.model(model).vocab_size, "token_ids")
        return await run_off_loop_if_large(
            len(token_ids),
            self.tokenizer.decode,
            token_ids,
            skip_special_tokens=skip_special_tokens,
        )

    def _learn(self, generation: Generation, finish: str) -> None:
        """Report the length of an answer, unless an error ended it."""
        ended = _ENDED.get(finish)
        if self._learner is not None and ended is not None:
            self._learner.learn(generation.admission, generation.usage.completion_tokens, ended)

    async def _next(self, deltas: AsyncIterator[Delta], generation: Generation) -> Delta:
        if generation.is_cancelled:
            return _aborted(generation)
        try:
            return await generation.deadline.wait(anext(deltas))
        except TimeoutError:
            if generation.is_cancelled:
                return _aborted(generation)
            raise ServiceError("deadline_exceeded") from None
        except StopAsyncIteration:
            raise ServiceError("worker_lost") from None

    async def _wait_for_prompt(self, generation: Generation) -> None:
        """Until the first answer to the same prompt has left it in the prefix cache."""
        if generation.first is None:
            return
        try:
            await generation.deadline.wait(generation.first.has_begun.wait())
        except TimeoutError:
            if not generation.is_cancelled:
                raise ServiceError("deadline_exceeded") from None

    def _generation(
        self,
        admission: AdmissionRequest,
        call: Call,
        start_s: float,
        first: Generation | None = None,
    ) -> Generation:
        prompt_ids = admission.request.prompt_ids
        # A raw completion continues its prompt, so its first token may carry a leading space.
        continues = not (call.options.echo or isinstance(call.prompt, ChatPrompt))
        return Generation(
            admission,
            call,
            self.tokenizer.detokenizer(
                skip_special_tokens=call.options.skip_special_tokens,
                after=prompt_ids if continues else (),
                shown=self._reasoning.shown(call),
            ),
            token_bytes=self.tokenizer.token_bytes,
            start_s=start_s,
            first=first,
            reasoning=self._reasoning.reader(call, prompt_ids),
        )


def _aborted(generation: Generation) -> Delta:
    return Delta(generation.request.request_id, [], FinishReason.ABORT)
