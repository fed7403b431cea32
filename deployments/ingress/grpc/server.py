"""The gRPC interface: penstock.v1.InferenceService over the request core, health, reflection.

Protobuf becomes Calls here, and only here. Knows nothing of workers, tokens or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.deployments.ingress.core.call import Call, TokenUsage
from penstock.deployments.ingress.core.logprobs import num_listed_tokens
from penstock.deployments.ingress.core.service import MAX_BODY_BYTES, RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.grpc import health as grpc_health
from penstock.deployments.ingress.grpc import open_inference as oip_ingress
from penstock.deployments.ingress.grpc.calls import Context, Named, about, answering, principal
from penstock.deployments.ingress.grpc.interceptor import Guard
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
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 1),  # several ingress replicas share a port
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", 4 * MAX_BODY_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message stays small
    ("grpc.keepalive_time_ms", 30_000),  # finds clients that vanished without a word
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class GrpcServer:
    """A running server. `port` is the one that it listens on, also if 0 was asked for."""

    def __init__(self, server: grpc.aio.Server, port: int, health: grpc_health.Health):
        self._server = server
        self._health = health
        self.port = port

    async def stop(self, grace_s: float = 0.0) -> None:
        """Report NOT_SERVING, take no new calls, and give those under way `grace_s` to end."""
        self._health.is_stopping = True
        await self._server.stop(grace_s)


async def start_server(
    core: RequestCore,
    address: str,
    *,
    api_keys: Sequence[str] = (),
    credentials: grpc.ServerCredentials | None = None,
) -> GrpcServer:
    """Serve `core` on `address` ("127.0.0.1:8001"; port 0 for any). TLS with `credentials`.

    With `api_keys` every method but those of grpc.health.v1 wants one of them in the metadata
    `authorization: Bearer <key>`. Raises RuntimeError if the address cannot be had.
    """
    keys = ApiKeys(api_keys)
    server = grpc.aio.server(interceptors=[Guard(keys)], options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(core, keys), server)
    health = grpc_health.Health(core, ("", SERVICE, oip_ingress.SERVICE))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    oip_ingress.add_to(server, core, keys)
    names = (SERVICE, oip_ingress.SERVICE, grpc_health.SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    return GrpcServer(server, port, health)


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, core: RequestCore, keys: ApiKeys):
        self._core = core
        self._keys = keys

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with answering(context) as named:
            call = Call(
                text_prompt(request),
                sampling(request.sampling),
                add_special_tokens=flag(request, "add_special_tokens", True),
                echo=request.echo,
                **self._about(request, named.request_id, context),
            )
            await self._answer(call, request, context, named, pb.GenerateResponse)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        async with answering(context) as named:
            prompt = chat_prompt(request)
            call = Call(
                prompt,
                sampling(request.sampling, prompt.tools),
                splits_reasoning=True,
                **self._about(request, named.request_id, context),
            )
            await self._answer(call, request, context, named, pb.ChatResponse)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context):
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
        async with answering(context):
            text = await self._core.detokenize(
                request.token_ids,
                model=request.model,
                skip_special_tokens=request.skip_special_tokens,
            )
            return pb.DetokenizeResponse(text=text)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with answering(context):
            done = self._core.cancel(request.request_id, principal(context, self._keys))
            return pb.CancelResponse(cancelled=done)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with answering(context):
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
        """Write the answer as it comes; every layer of generators less is felt at each token."""
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
                    answer.request_id = call.request_id
                    answer.client_request_id = call.client_id or ""
                    if request.return_prompt_token_ids:
                        answer.prompt_token_ids.extend(generations[0].request.prompt_ids)
                    await named.told()
                if piece.usage is not None:
                    usages.append(piece.usage)
                    if len(usages) == num_choices:
                        answer.usage.CopyFrom(usage_message(usages))
                await context.write(answer)

    def _about(
        self, request: pb.GenerateRequest | pb.ChatRequest, request_id: str, context: Context
    ) -> dict[str, Any]:
        client_id = request.client_request_id
        return {
            **about(context, self._keys, request_id, client_id, "client_request_id"),
            "model": request.model,
            "priority": priority(request),
            "wants_timings": request.return_timings,
            "skip_special_tokens": flag(request, "skip_special_tokens", True),
            "bad_words": bad_words(request.sampling),
            "include_stop_str_in_output": request.sampling.include_stop_str_in_output,
            "truncate_prompt_tokens": (
                request.truncate_prompt_tokens
                if request.HasField("truncate_prompt_tokens")
                else None
            ),
        }
