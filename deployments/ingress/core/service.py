"""Validates calls, runs them on a backend, and returns text: one core for all front ends.

Every cap and check that a client can meet is here, so that no front end can miss one. Imports no
HTTP, gRPC or worker: front ends pass `Call`s in, and a `TokenBackend` makes tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from penstock.deployments.ingress.core.answer_spans import add_answer, traced
from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport, support_of
from penstock.deployments.ingress.core.backend import Learner, Recorder, TokenBackend
from penstock.deployments.ingress.core.billing import Billing
from penstock.deployments.ingress.core.bounds.limits import OpenCalls, Turns
from penstock.deployments.ingress.core.call import Call, ServedModel
from penstock.deployments.ingress.core.errors import ServiceError, server_stops
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.preparation import Preparation, PreparationSettings
from penstock.deployments.ingress.core.request_metrics import (
    DISCONNECT,
    RequestMetrics,
    log_request,
)
from penstock.deployments.ingress.core.streams import (
    MAX_INLINE_SIZE,
    Pieces,
    merged,
    run_off_loop_if_large,
)
from penstock.deployments.ingress.core.text_pool import TextPool
from penstock.deployments.ingress.core.tracing import Tracer
from penstock.deployments.ingress.core.validation import (
    check_ids,
    check_num_ids,
    check_text,
    nth_choice,
)
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings
from penstock.workers.request import FinishReason, RequestError
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.text.reasoning import Marks
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.text.tool_forms import AUTO

MAX_BODY_BYTES = 4 << 20
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
        tokenizer: Tokenizer,
        backend: TokenBackend,
        *,
        model_name: str,
        other_names: tuple[str, ...] = (),
        vocab_size: int,
        max_model_len: int,
        marks: Marks | None = None,
        tools: ToolSupport | None = None,
        contexts: ContextSettings | None = None,
        learner: Learner | None = None,
        seed: int = 0,
        longest_wait_s: float | None = None,
        open_calls: OpenCalls | None = None,
        has_state_store: bool = False,
        shares_prefixes: bool = False,
        billing: Billing | None = None,
        sampling_defaults: SamplingDefaults | None = None,
        tracer: Tracer | None = None,
    ):
        """`other_names`: of the model, as in ServedModel.
        `learner`: receives the length of each answer; without one, requests carry no features.
        `vocab_size`: the model's; its tokenizer may know fewer tokens. `marks`: of reasoning.
        `tools`: how the model is given tools; None: as its chat template says.
        `contexts`: which context policies requests may choose; None: a worker's defaults.
        `seed`: of the seeds of requests that bring none. `longest_wait_s`: until a worker computes
        a request, in seconds; None: a request may wait until its own deadline. `open_calls`: bounds
        what the front ends accept; None: the default bounds. `has_state_store`: some answers can be
        continued after the end of this server. `shares_prefixes`: tenants share cached prompts.
        `billing`: quotas and weights of tenants; None: there are none. `sampling_defaults`: the
        model's own; None: it has none. `tracer`: with which the front ends begin the trace of each
        request; None: there are no traces."""
        self.tokenizer = tokenizer
        self.is_stopping = False  # it still serves, and load balancers should send no more
        self.open_calls = open_calls or OpenCalls()
        self.turns = Turns()
        self.tracer = tracer
        self._backend = backend
        self._tools = support_of(AUTO, tokenizer) if tools is None else tools
        self._model = ServedModel(
            model_name,
            vocab_size,
            max_model_len,
            tokenizer.has_chat_template,
            sampling_defaults or SamplingDefaults(),
            other_names=other_names,
            tool_call_parser=self._tools.name,
        )
        self._learner = learner
        self._has_state_store = has_state_store
        self.texts = TextPool()
        contexts = contexts or ContextSettings.of(EngineConfig(), max_model_len)
        how = PreparationSettings(contexts, marks, self._tools, longest_wait_s, shares_prefixes)
        self._preparation = Preparation(
            self._model, tokenizer, self.texts, how, billing=billing, seed=seed
        )
        self._running: dict[str, list[Generation]] = {}  # by the call's id
        self.metrics = RequestMetrics(model_name, max_model_len)

    def ready(self) -> bool:
        """Whether clients should send requests here: not when this ingress is about to stop."""
        return not self.is_stopping and self._backend.ready()

    @property
    def billing(self) -> Billing | None:
        """Quotas and weights of tenants; None: there are none."""
        return self._preparation.billing

    @billing.setter
    def billing(self, billing: Billing | None) -> None:
        self._preparation.billing = billing

    @property
    def num_running(self) -> int:
        """Calls that run, with or without a client that waits for them."""
        return len(self._running)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """With these the front ends make the parameters of a call."""
        return self._model.sampling_defaults

    @property
    def tool_note(self) -> str:
        """What an operator should know of tool calls; empty: nothing."""
        note = self._tools.note
        return note if self._tools.form else f"WARNING: {note}"

    def models(self) -> list[ServedModel]:
        """The served model, which may have several names."""
        return [self._model]

    def model(self, name: str | None) -> ServedModel:
        """The model of that name. Raises RequestError model_not_found."""
        return self._preparation.model(name)

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
            admission, split = await self._preparation.admission(
                call, num_choices, has_features=self._learner is not None
            )
        except (RequestError, ServiceError) as refusal:
            log_request(call.context, refusal.code)
            raise
        bill = self._preparation.bill(call, admission.request, num_choices)
        admission = traced(admission, call)
        first = Generation(
            *(admission, call, self.tokenizer, start_s),
            split=split,
            support=self._tools,
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
                traced(replace(admission, request=request), call),
                *(call, self.tokenizer, start_s),
                split=split,
                support=self._tools,
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
        times, usage = generation.times, generation.usage
        # What is read again, or followed, was counted where it was generated.
        counts = recorder is None or recorder.generates
        finish, bill, is_billed = DISCONNECT, generation.bill, False
        held = ExitStack()
        try:
            held.enter_context(self.open_calls.holding(generation.num_held_bytes))
            if bill is not None:
                await bill.begin()
                is_billed = True
            await generation.wait_for_prompt()
            admission = generation.admission
            generated = (
                self._backend.generate(admission)
                if recorder is None
                else recorder.generate(admission, self._backend)
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
                        self.metrics.count_tokens(times, delta, len(piece.token_ids), usage)
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
            if counts:
                self.metrics.count_end(times, finish, usage)
                self._learn(generation, finish)
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
                    *(admission, call, self._model.name, finish),
                    times=times,
                    usage=usage,
                    now_s=time.monotonic(),
                )

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
        self.model(model)
        check_text(text, "text")
        return await self.texts.run(
            principal,
            len(text),
            self.tokenizer.encode,
            text,
            add_special_tokens=add_special_tokens,
        )

    async def prompt_ids(self, call: Call) -> tuple[int, ...]:
        """The prompt of `call` as the model would read it, however long. Raises RequestError."""
        model = self.model(call.options.model)
        return await self._preparation.prompts.ids(call, model, model.max_model_len)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool,
        principal: str = "",
    ) -> str:
        """The text of `token_ids`. Raises RequestError or ServiceError."""
        served = self.model(model)
        check_num_ids(token_ids, served.max_model_len, "token_ids")
        check_ids(token_ids, served.vocab_size, "token_ids")
        return await self.texts.run(
            principal,
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
