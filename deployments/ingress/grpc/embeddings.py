"""Messages of Embed, as calls of the request core and back."""

from __future__ import annotations

from penstock.deployments.ingress.core.call import CallContext, CallOptions
from penstock.deployments.ingress.core.embeddings.embed import (
    MAX_INPUTS,
    EmbeddingCall,
    Embeddings,
    Input,
    embedding_call,
)
from penstock.deployments.ingress.grpc.messages import (
    MAX_ANSWER_BYTES,
    flag,
    priority,
    usage_message,
)
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.workers.request import RequestError

VECTOR_BYTES = 32  # of a message, around the numbers of each vector


def embed_call(request: pb.EmbedRequest, context: CallContext) -> EmbeddingCall:
    """Raises RequestError naming the field that is wrong."""
    if not request.inputs:
        raise RequestError("inputs is empty", param="inputs")
    if len(request.inputs) > MAX_INPUTS:  # before all of them are looked at
        raise RequestError(f"inputs takes at most {MAX_INPUTS} texts in one call", param="inputs")
    has_limit = request.HasField("truncate_prompt_tokens")
    options = CallOptions(
        model=request.model,
        priority=priority(request),
        cache_salt=request.cache_salt,
        add_special_tokens=flag(request, "add_special_tokens", True),
        truncate_prompt_tokens=request.truncate_prompt_tokens if has_limit else None,
    )
    return embedding_call(
        [_input(each, index) for index, each in enumerate(request.inputs)],
        (f"inputs[{index}]" for index in range(len(request.inputs))),
        options,
        context,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=flag(request, "normalize", True),
    )


def embed_message(found: Embeddings, context: CallContext) -> pb.EmbedResponse:
    """Raises RequestError where one message cannot hold all of them."""
    num, size = len(found.vectors), found.vectors.nbytes
    if size + num * VECTOR_BYTES > MAX_ANSWER_BYTES:
        raise RequestError(
            f"inputs: {num} vectors take {size} bytes, and a gRPC message {MAX_ANSWER_BYTES}: send "
            "fewer inputs in one call, ask for fewer dimensions, or use the HTTP API",
            param="inputs",
        )
    return pb.EmbedResponse(
        embeddings=[pb.Embedding(values=each) for each in found.vectors],
        usage=usage_message([found.usage]),
        request_id=context.request_id,
        client_request_id=context.client_id or "",
    )


def _input(message: pb.EmbedInput, index: int) -> Input:
    kind = message.WhichOneof("input")
    if kind == "token_ids":
        return tuple(message.token_ids.ids)
    if kind is None:
        raise RequestError(
            f"inputs[{index}]: give text or token_ids",
            param=f"inputs[{index}]",
            code="missing_parameter",
        )
    return message.text
