"""penstock.v1.InferenceService over the request core: its messages become Calls here."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Generic

from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, TokenUsage
from penstock.deployments.ingress.core.embeddings.embed import embed
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.logprobs import num_listed_tokens
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.grpc.calls import (
    Context,
    Named,
    answering,
    begin_trace,
    caller_of,
    context_of,
    metadata_value,
)
from penstock.deployments.ingress.grpc.embeddings import embed_call, embed_message
from penstock.deployments.ingress.grpc.messages import (
    AnswerT,
    answer_message,
    bad_words,
    bare_end,
    chat_prompt,
    check_sendable,
    flag,
    priority,
    sampling,
    text_prompt,
    usage_message,
)
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.idempotency import Key, checked_key, fingerprint
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.journal.once import once, release_unused
from penstock.deployments.ingress.journal.received import Received
from penstock.deployments.security.api_keys import ApiKeys
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import RequestError

SERVICE = "penstock.v1.InferenceService"
KEY = "idempotency-key"  # in a call's metadata


@dataclass(frozen=True, slots=True)
class Method(Generic[AnswerT]):
    """A method that streams an answer."""

    name: str
    request: type[pb.GenerateRequest] | type[pb.ChatRequest]
    answer: type[AnswerT]


GENERATE = Method(f"{SERVICE}/Generate", pb.GenerateRequest, pb.GenerateResponse)
CHAT = Method(f"{SERVICE}/Chat", pb.ChatRequest, pb.ChatResponse)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, core: RequestCore, keys: ApiKeys, journals: Journals | None):
        self._core = core
        self._keys = keys
        self._journals = journals
        self._errors = core.metrics.num_errors_returned

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        await self._begin(request, context, GENERATE)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        await self._begin(request, context, CHAT)

    async def ResumeGenerate(self, request: pb.ResumeRequest, context: Context) -> None:
        await self._resume(request, context, GENERATE, "ResumeGenerate")

    async def ResumeChat(self, request: pb.ResumeRequest, context: Context) -> None:
        await self._resume(request, context, CHAT, "ResumeChat")

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        trace = begin_trace(self._core.tracer, context, f"{SERVICE}/Embed")
        async with answering(context, self._errors, trace=trace) as named:
            about = context_of(
                context,
                self._keys,
                named.request_id,
                request.client_request_id,
                "client_request_id",
                trace=trace,
            )
            found = await embed(self._core, embed_call(request, about))
            size = int(found.vectors.size)
            return await run_off_loop_if_large(size, embed_message, found, about)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context, self._errors):
            token_ids = await self._core.tokenize(
                request.text,
                model=request.model,
                add_special_tokens=flag(request, "add_special_tokens", True),
                principal=caller_of(context, self._keys).tenant,
            )
            max_model_len = self._core.model(request.model).max_model_len
            return pb.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with answering(context, self._errors):
            text = await self._core.detokenize(
                request.token_ids,
                model=request.model,
                skip_special_tokens=request.skip_special_tokens,
                principal=caller_of(context, self._keys).tenant,
            )
            return pb.DetokenizeResponse(text=text)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with answering(context, self._errors):
            done = self._core.cancel(request.request_id, caller_of(context, self._keys).tenant)
            return pb.CancelResponse(cancelled=done)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with answering(context, self._errors):
            models = [
                pb.Model(
                    name=name,
                    max_model_len=model.max_model_len,
                    vocab_size=model.vocab_size,
                    has_chat_template=model.has_chat_template,
                )
                for model in self._core.models()
                for name in model.names
            ]
            return pb.ListModelsResponse(models=models)

    async def _begin(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        method: Method[AnswerT],
    ) -> None:
        journals = self._journals
        trace = begin_trace(self._core.tracer, context, method.name)
        waits = journals is not None
        async with answering(context, self._errors, waits=waits, trace=trace) as named:
            about = context_of(
                context,
                self._keys,
                named.request_id,
                request.client_request_id,
                "client_request_id",
                wants_timings=request.return_timings,
                trace=trace,
            )
            if journals is None:
                generations = await self._prepared(request, about)
                await self._answer(request, generations, context, named, method.answer)
                return
            key = metadata_value(context.invocation_metadata(), KEY)
            if key is not None:
                await self._once(journals, request, about, context, named, method, key)
                return
            journal = journals.journal_for(about, method.name, request.SerializeToString())
            generations = await self._prepared(request, replace(about, seed=journal.head.seed))
            await journals.begin(journal)
            named.send_id(is_resumable=journal.is_kept)
            kept = journal if journal.is_kept else None
            await self._answer(request, generations, context, named, method.answer, kept)

    async def _once(
        self,
        journals: Journals,
        request: pb.GenerateRequest | pb.ChatRequest,
        about: CallContext,
        context: Context,
        named: Named,
        method: Method[AnswerT],
        text: str,
    ) -> None:
        """Answer a call with an idempotency key: a new one, or with an earlier call's answer."""
        content = request.SerializeToString(deterministic=True)
        digest = fingerprint(method.name, content)
        key = Key(about.principal, method.name, checked_key(text, KEY), digest)

        async def prepare(about: CallContext, _: CallJournal) -> list[Generation]:
            return await self._prepared(request, about)

        new = await once(journals, key, about, content, prepare)
        if isinstance(new, str):
            context.set_trailing_metadata((("idempotent-replayed", "true"),))
            await self._continue(journals, new, (), about, context, named, method)
            return
        named.send_id(is_resumable=True)
        try:
            await self._answer(request, new.prepared, context, named, method.answer, new.journal)
        finally:
            await release_unused(journals, key, new.journal)

    async def _resume(
        self, asked: pb.ResumeRequest, context: Context, method: Method[AnswerT], name: str
    ) -> None:
        """`name`: of the method that resumes a stream of `method`."""
        trace = begin_trace(self._core.tracer, context, f"{SERVICE}/{name}")
        async with answering(context, self._errors, waits=True, trace=trace) as named:
            if self._journals is None:
                raise ServiceError("no_journal")
            about = context_of(context, self._keys, asked.request_id, "", "request_id", trace=trace)
            received = tuple(map(_received, asked.received))
            await self._continue(
                self._journals, asked.request_id, received, about, context, named, method
            )

    async def _continue(
        self,
        journals: Journals,
        call_id: str,
        received: tuple[Received, ...],
        about: CallContext,
        context: Context,
        named: Named,
        method: Method[AnswerT],
    ) -> None:
        """Answer with the rest of a call, after what the client has `received`."""
        head = await journals.head(call_id, about.principal)
        if head.route != method.name:
            raise RequestError(f"this stream is one of {head.route}", param="request_id")
        journal = await journals.resume(call_id, head, received)
        named.send_id(is_resumable=True)
        request = method.request.FromString(head.body)
        about = replace(
            about,
            request_id=call_id,
            client_id=head.client_id,
            seed=head.seed,
            wants_timings=head.wants_timings,
            max_priority=0,
            is_continued=True,
        )
        generations = await self._prepared(request, about)
        await self._answer(request, generations, context, named, method.answer, journal)

    async def _prepared(
        self, request: pb.GenerateRequest | pb.ChatRequest, about: CallContext
    ) -> list[Generation]:
        """The checked answers that a request asks for. Raises RequestError or ServiceError."""
        options, runtime = _options(request), self._core.named(request.model)
        if isinstance(request, pb.ChatRequest):
            prompt = chat_prompt(request)
            params = sampling(request.sampling, runtime.sampling_defaults, prompt.tools)
            call = Call(prompt, params, replace(options, splits_reasoning=True), about)
        else:
            options = replace(
                options,
                add_special_tokens=flag(request, "add_special_tokens", True),
                echo=request.echo,
            )
            prompt_text = text_prompt(request)
            params = sampling(request.sampling, runtime.sampling_defaults)
            call = Call(prompt_text, params, options, about)
        num_choices = request.n if request.HasField("n") else 1
        generations = await self._core.prepare_choices(call, num_choices)
        check_sendable(request, generations[0], runtime.tokenizer)
        return generations

    async def _answer(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        generations: list[Generation],
        context: Context,
        named: Named,
        kind: type[AnswerT],
        journal: CallJournal | None = None,
    ) -> None:
        """Write the answer as it is generated: one more generator would cost time at each token."""
        call = generations[0].call
        delivery = None if journal is None else journal.delivery(generations)
        usages: list[TokenUsage] = []
        is_first = True
        async with aclosing(self._core.run_many(generations, journal)) as pieces:
            async for index, piece in pieces:
                if piece.usage is not None:
                    usages.append(piece.usage)
                is_last = piece.usage is not None and len(usages) == len(generations)
                if delivery is not None and not delivery.is_new(index, piece):
                    if not is_last or delivery.had_all_ends:
                        continue
                    # Replayed, the answers end in another order: the usage comes with this end.
                    piece = bare_end(piece)
                if piece.logprobs or piece.prompt_logprobs:
                    size = num_listed_tokens(piece.logprobs, piece.prompt_logprobs)
                    answer = await run_off_loop_if_large(size, answer_message, kind, index, piece)
                else:
                    answer = answer_message(kind, index, piece)
                if is_first:
                    is_first = False
                    answer.request_id = call.context.request_id
                    answer.client_request_id = call.context.client_id or ""
                    if request.return_prompt_token_ids:
                        answer.prompt_token_ids.extend(generations[0].request.prompt_ids)
                    await named.id_sent()
                if is_last:
                    answer.usage.CopyFrom(usage_message(usages))
                await context.write(answer)


def _received(message: pb.ReceivedTokens) -> Received:
    checksum = message.checksum if message.HasField("checksum") else None
    return Received(message.num_tokens, message.has_ended, checksum)


def _options(request: pb.GenerateRequest | pb.ChatRequest) -> CallOptions:
    has_limit = request.HasField("truncate_prompt_tokens")
    return CallOptions(
        model=request.model,
        priority=priority(request),
        cache_salt=request.cache_salt,
        skip_special_tokens=flag(request, "skip_special_tokens", True),
        bad_words=bad_words(request.sampling),
        include_stop_str_in_output=request.sampling.include_stop_str_in_output,
        truncate_prompt_tokens=request.truncate_prompt_tokens if has_limit else None,
    )
