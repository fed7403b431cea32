"""Validates calls, runs them on a backend, and returns text: one core for all front ends.

Every cap and check that a client can meet is here, so that no front end can miss one. Imports no
HTTP, gRPC or worker: front ends pass `Call`s in, and the `TokenBackend` of their model (runtime.py)
makes tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from penstock.deployments.ingress.core.backend import Learner, Recorder
from penstock.deployments.ingress.core.billing import Billing
from penstock.deployments.ingress.core.bounds.limits import OpenCalls, Turns
from penstock.deployments.ingress.core.call import Call, ServedModel
from penstock.deployments.ingress.core.errors import ServiceError, server_stops
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.history.answer_spans import add_answer
from penstock.deployments.ingress.core.history.recent_answers import AnswerRecord, RecentAnswers
from penstock.deployments.ingress.core.prompts import PromptReader
from penstock.deployments.ingress.core.request_metrics import (
    DISCONNECT,
    RequestMetrics,
    log_request,
)
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.streams import (
    MAX_INLINE_SIZE,
    Pieces,
    merged,
    run_off_loop_if_large,
)
from penstock.deployments.ingress.core.text_pool import TextPool
from penstock.deployments.ingress.core.tracing import AnswerTrace, Tracer
from penstock.deployments.ingress.core.validation import (
    check_ids,
    check_num_ids,
    check_text,
    nth_choice,
)
from penstock.workers.request import FinishReason, RequestError
from penstock.workers.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 4 << 20
MAX_MODEL_NAME_CHARS = 200  # of an unknown one, in an error
MAX_PROMPTS = 64  # prompts of one call

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
        *models: ModelRuntime,
        open_calls: OpenCalls | None = None,
        has_state_store: bool = False,
        billing: Billing | None = None,
        tracer: Tracer | None = None,
    ):
        """`models`: one or more; no two have a name in common. `open_calls`: bounds what the front
        ends accept; None: the default bounds. `has_state_store`: some answers can be continued
        after the end of this server. `billing`: quotas and weights of tenants; None: there are
        none. `tracer`: with which the front ends begin the trace of each request; None: there are
        no traces."""
        self.is_stopping = False  # it still serves, and load balancers should send no more
        self.open_calls = open_calls or OpenCalls()
        self.turns = Turns()
        self.tracer = tracer
        self.runtimes = models
        self._has_state_store = has_state_store
        self.texts = TextPool()
        self._preparations = {each: each.preparation(self.texts) for each in models}
        self.billing = billing
        self._running: dict[str, list[Generation]] = {}  # by the call's id
        self.recent = RecentAnswers()

    def ready(self) -> bool:
        """Whether clients should send requests here: not when this ingress is about to stop, nor
        before each model has had a worker; then, while any of them has one."""
        is_ready = [each.ready() for each in self.runtimes]
        had_all = all(each.was_ready for each in self.runtimes)
        return not self.is_stopping and had_all and any(is_ready)

    def models_without_worker(self) -> list[str]:
        """The names of the models whose requests no worker takes now."""
        return [each.served.name for each in self.runtimes if not each.ready()]

    @property
    def metrics(self) -> RequestMetrics:
        """Of the first model; and the errors that were returned, whichever model a call had."""
        return self.runtimes[0].metrics

    @property
    def billing(self) -> Billing | None:
        """Quotas and weights of tenants; None: there are none."""
        return self._billing

    @billing.setter
    def billing(self, billing: Billing | None) -> None:
        self._billing = billing
        for each in self._preparations.values():
            each.billing = billing

    @property
    def num_running(self) -> int:
        """Calls that run, with or without a client that waits for them."""
        return len(self._running)

    def models(self) -> list[ServedModel]:
        """The served models, each of which may have several names."""
        return [each.served for each in self.runtimes]

    def model(self, name: str | None) -> ServedModel:
        """The model of that name. Raises RequestError model_not_found."""
        return self._runtime(name).served.named(name)

    def named(self, name: str | None) -> ModelRuntime:
        """The model with that name, or the one that takes any name, or the first.

        For what precedes `prepare`, which refuses names that no model has.
        """
        found = (each for each in self.runtimes if name in each.served.names)
        anyone = (each for each in self.runtimes if each.served.has_any_name)
        return next(found, None) or (next(anyone, None) if name else None) or self.runtimes[0]

    def _runtime(self, name: str | None) -> ModelRuntime:
        """The same. Raises RequestError model_not_found."""
        runtime = self.named(name)
        if name and not runtime.served.answers_to(name):
            shown = ascii(name[:MAX_MODEL_NAME_CHARS])
            served = ", ".join(name for each in self.models() for name in each.names)
            raise RequestError(
                f"the model {shown} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return runtime

    async def prepare(self, call: Call) -> Generation:
        """Check a call whole and make its prompt token ids. Raises RequestError or ServiceError."""
        (generation,) = await self.prepare_choices(call, 1)
        return generation

    async def prepare_choices(self, call: Call, num_choices: int) -> list[Generation]:
        """`prepare` for `num_choices` answers to one prompt, which is computed once for all.

        Run them with `run_many`. A seed gives each answer draws of its own, the same in each call.
        """
        start_s = time.monotonic()
        try:
            runtime = self._runtime(call.options.model)
            preparation = self._preparations[runtime]
            admission, split = await preparation.admission(
                call, num_choices, has_features=runtime.learner is not None
            )
            bill = preparation.bill(call, admission.request, num_choices)
        except (RequestError, ServiceError) as refusal:
            log_request(call.context, refusal.code)
            raise
        first = Generation(
            *(replace(admission, trace=AnswerTrace()), call, runtime.tokenizer, start_s),
            split=split,
            support=runtime.tools,
            bill=bill,
        )
        further = (
            replace(
                first.request,
                request_id=f"{call.context.request_id}.{index}",
                params=nth_choice(first.request.params, index),
            )
            for index in range(1, num_choices)
        )
        others = [
            Generation(
                replace(admission, request=request, trace=AnswerTrace()),
                *(call, runtime.tokenizer, start_s),
                split=split,
                support=runtime.tools,
                first=first,
                bill=bill,
            )
            for request in further
        ]
        return [first, *others]

    async def run(
        self, generation: Generation, index: int = 0, recorder: Recorder | None = None
    ) -> Pieces:
        """The answer in pieces, each with `index`; the last has finish_reason and usage.

        Raises ServiceError if it cannot be finished, or has more scores of its prompt than there is
        memory for. Closing this generator drops the request.
        """
        answers = self._running.setdefault(generation.call.context.request_id, [])
        answers.append(generation)
        runtime = self.named(generation.call.options.model)
        backend, metrics = runtime.backend, runtime.metrics
        times, usage = generation.times, generation.usage
        # What is read again, or followed, was counted where it was generated.
        counts = recorder is None or recorder.generates
        finish, bill, is_billed = DISCONNECT, generation.bill, False
        record = self._recorded(generation, runtime)
        held = ExitStack()
        try:
            held.enter_context(self.open_calls.holding(generation.num_held_bytes))
            if bill is not None:
                await bill.begin()
                is_billed = True
            await generation.wait_for_prompt()
            admission = generation.admission
            generated = (
                backend.generate(admission)
                if recorder is None
                else recorder.generate(admission, backend)
            )
            async with aclosing(generated) as deltas:
                while True:
                    delta = await generation.next(deltas)
                    times.engine = delta.engine or times.engine
                    work = generation.work_in(delta)
                    if work <= MAX_INLINE_SIZE:  # as it nearly always is: no coroutine for that
                        piece = generation.take(delta)
                    else:
                        piece = await run_off_loop_if_large(work, generation.take, delta)
                    generation.has_begun.set()
                    piece = generation.read_tool_calls(piece)
                    if piece.token_ids and not delta.is_replayed:
                        metrics.count_tokens(times, delta, len(piece.token_ids), usage)
                    elif piece.embedding:
                        metrics.count_embedding(times, delta, usage)
                    if piece.finish_reason is not None:
                        finish = piece.finish_reason.value
                        counts = counts and not delta.is_replayed
                        if generation.call.context.wants_timings:
                            usage.timings = times.timings(time.monotonic())
                    yield index, piece
                    if piece.finish_reason is not None:
                        return
        except (RequestError, ServiceError) as failure:
            finish = failure.code
            if finish == "worker_lost" and self.is_stopping:
                name = None if recorder is None else generation.call.context.request_id
                raise server_stops(name, has_state_store=self._has_state_store) from None
            raise
        except Exception:
            finish = "internal_error"
            raise
        finally:
            held.close()
            generation.deadline.close()
            generation.has_begun.set()  # other answers may wait for the prompt
            answers.remove(generation)
            if not answers:
                self._running.pop(generation.call.context.request_id, None)
            if bill is not None and is_billed:
                bill.ended(usage, is_computed=bool(times.engine or usage.completion_tokens))
            self.recent.end(record, finish)
            if counts:
                metrics.count_end(times, finish, usage)
                _learn(runtime.learner, generation, finish)
            call, admission = generation.call, generation.admission
            log_request(
                call.context,
                finish,
                request_id=admission.request_id,
                times=times,
                usage=usage,
                is_repeated=not counts,
            )
            if admission.trace is not None:
                add_answer(
                    *(admission, call, runtime.served.name, finish),
                    times=times,
                    usage=usage,
                    now_s=time.monotonic(),
                )

    def _recorded(self, generation: Generation, runtime: ModelRuntime) -> AnswerRecord:
        """Its entry in `recent`, which follows it."""
        admission, context = generation.admission, generation.call.context
        record = AnswerRecord(
            admission.request_id,
            runtime.served.name,
            context.principal,
            admission.request.priority,
            admission.trace or AnswerTrace(),
            generation.times,
            generation.usage,
        )
        self.recent.begin(context.request_id, record)
        return record

    def run_many(
        self, generations: Sequence[Generation], recorder: Recorder | None = None
    ) -> Pieces:
        """All answers in parallel, each piece with the index of its generation.

        The first failure ends them all; so does closing this generator.
        """
        if len(generations) == 1:
            return self.run(generations[0], 0, recorder)
        return merged([self.run(each, index, recorder) for index, each in enumerate(generations)])

    def cancel(self, request_id: str, principal: str = "") -> bool:
        """End a call of this principal; its answers end with ABORT. False: there is none."""
        answers = self._running.get(request_id)
        if not answers or answers[0].call.context.principal != principal:
            return False
        for generation in answers:
            generation.cancel()
        return True

    def end_calls(self, ended: Callable[[str, str], str | None]) -> None:
        """End the calls of keys that are valid no more. `ended`: with which error code, by the id
        and the tenant of a key; None: they go on."""
        for answers in list(self._running.values()):
            context = answers[0].call.context
            code = ended(context.key_id, context.principal) if context.key_id else None
            if code is not None:
                for generation in answers:
                    generation.cancel(code)

    async def tokenize(
        self,
        text: str,
        *,
        model: str | None = None,
        add_special_tokens: bool = True,
        principal: str = "",
    ) -> list[int]:
        """Token ids of `text`. Raises RequestError or ServiceError."""
        tokenizer = self._runtime(model).tokenizer
        check_text(text, "text")
        return await self.texts.run(
            principal,
            len(text),
            tokenizer.encode,
            text,
            add_special_tokens=add_special_tokens,
        )

    async def prompt_ids(self, call: Call) -> tuple[int, ...]:
        """The prompt of `call` as the model would read it, however long. Raises RequestError."""
        runtime = self._runtime(call.options.model)
        prompts, model = self._preparations[runtime].prompts, runtime.served
        return await prompts.ids(call, model, model.max_model_len)

    def reader(self, model: str | None = None) -> tuple[Tokenizer, PromptReader]:
        """A model's tokenizer, and what reads its prompts. Raises RequestError."""
        runtime = self._runtime(model)
        return runtime.tokenizer, self._preparations[runtime].prompts

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool,
        principal: str = "",
    ) -> str:
        """The text of `token_ids`. Raises RequestError or ServiceError."""
        runtime = self._runtime(model)
        served = runtime.served
        check_num_ids(token_ids, served.max_model_len, "token_ids")
        check_ids(token_ids, served.vocab_size, "token_ids")
        return await self.texts.run(
            principal,
            len(token_ids),
            runtime.tokenizer.decode,
            token_ids,
            skip_special_tokens=skip_special_tokens,
        )


def _learn(learner: Learner | None, generation: Generation, finish: str) -> None:
    """Report the length of an answer, unless an error ended it."""
    ended = _ENDED.get(finish)
    if learner is not None and ended is not None and not generation.request.embeds:
        learner.learn(generation.admission, generation.usage.completion_tokens, ended)
