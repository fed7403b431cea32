"""penstock.v1.InferenceService over the request core: its messages become Calls here."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, TokenUsage
from penstock.deployments.ingress.core.logprobs import num_listed_tokens
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.grpc.calls import (
    Context,
    Named,
    answering,
    context_of,
    principal,
)
from penstock.deployments.ingress.grpc.messages import (
    AnswerT,
    answer_message,
    bad_words,
    chat_prompt,
    flag,
    priority,
    sampling,
    text_prompt,
    usage_message,
)
from penstock.deployments.security.api_keys import ApiKeys
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc

SERVICE = "penstock.v1.InferenceService"


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, core: RequestCore, keys: ApiKeys):
        self._core = core
        self._keys = keys
        self._errors = core.metrics.num_errors_returned

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with answering(context, self._errors) as named:
            options = replace(
                _options(request),
                add_special_tokens=flag(request, "add_special_tokens", True),
                echo=request.echo,
            )
            about = self._context(request, named.request_id, context)
            call = Call(text_prompt(request), sampling(request.sampling), options, about)
            await self._answer(call, request, context, named, pb.GenerateResponse)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        async with answering(context, self._errors) as named:
            prompt = chat_prompt(request)
            options = replace(_options(request), splits_reasoning=True)
            about = self._context(request, named.request_id, context)
            call = Call(prompt, sampling(request.sampling, prompt.tools), options, about)
            await self._answer(call, request, context, named, pb.ChatResponse)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context, self._errors):
            token_ids = await self._core.tokenize(
                request.text,
                model=request.model,
                add_special_tokens=flag(request, "add_special_tokens", True),
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
            )
            return pb.DetokenizeResponse(text=text)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with answering(context, self._errors):
            done = self._core.cancel(request.request_id, principal(context, self._keys))
            return pb.CancelResponse(cancelled=done)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with answering(context, self._errors):
            models = [
                pb.Model(
                    name=model.name,
                    max_model_len=model.max_model_len,
                    vocab_size=model.vocab_size,
                    has_chat_template=model.has_chat_template,
                )
                for model in self._core.models()
            ]
            return pb.ListModelsResponse(models=models)

    async def _answer(
        self,
        call: Call,
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        named: Named,
        kind: type[AnswerT],
    ) -> None:
        """Write the answer as it is generated: one more generator would cost time at each token."""
        num_choices = request.n if request.HasField("n") else 1
        generations = await self._core.prepare_choices(call, num_choices)
        usages: list[TokenUsage] = []
        is_first = True
        async with aclosing(self._core.run_many(generations)) as pieces:
            async for index, piece in pieces:
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
                if piece.usage is not None:
                    usages.append(piece.usage)
                    if len(usages) == num_choices:
                        answer.usage.CopyFrom(usage_message(usages))
                await context.write(answer)

    def _context(
        self, request: pb.GenerateRequest | pb.ChatRequest, request_id: str, context: Context
    ) -> CallContext:
        return context_of(
            context,
            self._keys,
            request_id,
            request.client_request_id,
            "client_request_id",
            wants_timings=request.return_timings,
        )


def _options(request: pb.GenerateRequest | pb.ChatRequest) -> CallOptions:
    has_limit = request.HasField("truncate_prompt_tokens")
    return CallOptions(
        model=request.model,
        priority=priority(request),
        skip_special_tokens=flag(request, "skip_special_tokens", True),
        bad_words=bad_words(request.sampling),
        include_stop_str_in_output=request.sampling.include_stop_str_in_output,
        truncate_prompt_tokens=request.truncate_prompt_tokens if has_limit else None,
    )
