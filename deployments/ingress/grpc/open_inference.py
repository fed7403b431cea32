"""The Open Inference Protocol over gRPC: inference.GRPCInferenceService, text in and text out.

Its tensors and parameters become Calls here.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from penstock.deployments.ingress.core.call import Call, CallOptions, ServedModel, TextDelta
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.service import MAX_PROMPTS, RequestCore
from penstock.deployments.ingress.grpc.calls import (
    Context,
    answering,
    begin_trace,
    context_of,
)
from penstock.deployments.security.api_keys import ApiKeys
from penstock.protos.inference import open_inference_pb2 as pb
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.workers.parameters import Api
from penstock.workers.request import PARAMETERS, RequestError, SamplingParams

SERVICE = "inference.GRPCInferenceService"
VERSION = "1"  # of every model: a new one is a new name
INPUT = "text_input"
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 4  # before each text of a raw BYTES tensor
_OFFERED = [each for each in PARAMETERS.values() if Api.OPEN_INFERENCE in each.apis]
_FRACTIONS = tuple(each.name for each in _OFFERED if each.kind == "float")
_WHOLES = tuple(each.name for each in _OFFERED if each.kind == "int")
_FLAGS = (
    *(each.name for each in _OFFERED if each.kind == "bool"),
    *("add_special_tokens", "skip_special_tokens"),
)


def add_to(server: grpc.aio.Server, core: RequestCore, keys: ApiKeys) -> None:
    """Serve `core` by this protocol, too."""
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        _OpenInference(core, keys), server
    )


class _OpenInference(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, core: RequestCore, keys: ApiKeys):
        self._core = core
        self._keys = keys
        self._errors = core.metrics.num_errors_returned

    async def ServerLive(self, request: pb.ServerLiveRequest, _: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, _: Context
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._core.ready())

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        async with answering(context, self._errors):
            model = self._model(request.name, request.version)
            is_there = model.model not in self._core.models_without_worker()
            return pb.ModelReadyResponse(ready=is_there and not self._core.is_stopping)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, _: Context
    ) -> pb.ServerMetadataResponse:
        version = importlib.metadata.version("penstock")
        return pb.ServerMetadataResponse(name="penstock", version=version)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        async with answering(context, self._errors):
            model = self._model(request.name, request.version)
            tensor = pb.ModelMetadataResponse.TensorMetadata
            return pb.ModelMetadataResponse(
                name=model.name,
                versions=[VERSION],
                platform="penstock_text",
                inputs=[tensor(name=INPUT, datatype="BYTES", shape=[-1])],
                outputs=[
                    tensor(name=name, datatype=datatype, shape=[-1])
                    for name, datatype in OUTPUTS.items()
                ],
            )

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        trace = begin_trace(self._core.tracer, context, f"{SERVICE}/ModelInfer")
        async with answering(context, self._errors, trace=trace) as named:
            model = self._model(request.model_name, request.model_version)
            wanted = _wanted(request)
            texts = _texts(request)
            params, options = _sampling(request.parameters, model)
            about = context_of(
                *(context, self._keys, named.request_id, request.id, "id"), trace=trace
            )
            calls = [
                Call(text, params, options, about.of_prompt(i, len(texts)))
                for i, text in enumerate(texts)
            ]
            generations = [await self._core.prepare(call) for call in calls]
            answers = [_TextOutput() for _ in texts]
            async with aclosing(self._core.run_many(generations)) as pieces:
                async for index, piece in pieces:
                    answers[index].add(piece)
            return _response(request, model, wanted, answers)

    def _model(self, name: str, version: str) -> ServedModel:
        model = self._core.model(name)
        if version not in ("", VERSION):
            raise RequestError(
                f"the model has version {VERSION!r} only", param="version", code="model_not_found"
            )
        return model


@dataclass(slots=True)
class _TextOutput:
    texts: list[str] = field(default_factory=list)
    last: TextDelta | None = None

    def add(self, piece: TextDelta) -> None:
        self.texts.append(piece.text)
        self.last = piece

    def value(self, name: str) -> Any:
        """The answer's element of that output: bytes or a number."""
        last = self.last
        if last is None or last.finish_reason is None or last.usage is None:
            raise ServiceError("worker_lost")
        values: dict[str, Any] = {
            "text_output": "".join(self.texts).encode(),
            "finish_reason": last.finish_reason.value.encode(),
            "num_input_tokens": last.usage.prompt_tokens,
            "num_output_tokens": last.usage.completion_tokens,
        }
        return values[name]


def _wanted(request: pb.ModelInferRequest) -> list[str]:
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise RequestError(
                f"there is no output {_shown(output.name)}; there are {', '.join(OUTPUTS)}",
                param="outputs",
            )
        _refuse_parameters(output.parameters, f"outputs.{output.name}.parameters")
    names = [output.name for output in request.outputs]
    if len(set(names)) != len(names):
        raise RequestError("each output can be asked for once", param="outputs")
    return names or list(OUTPUTS)


def _texts(request: pb.ModelInferRequest) -> list[str]:
    """The prompts. Raises RequestError unless there is one tensor of texts, as its shape says."""
    for tensor in request.inputs:
        if tensor.name != INPUT:
            raise RequestError(
                f"there is no input {_shown(tensor.name)}; there is {INPUT}",
                param="inputs",
                code="unknown_parameter",
            )
    if len(request.inputs) != 1:
        raise RequestError(f"send one tensor {INPUT}", param="inputs", code="missing_parameter")
    tensor = request.inputs[0]
    _refuse_parameters(tensor.parameters, f"{INPUT}.parameters")
    if tensor.datatype != "BYTES":
        raise RequestError(f"{INPUT} must be of type BYTES", param=INPUT)
    if not 1 <= len(tensor.shape) <= MAX_DIMENSIONS or min(tensor.shape) < 0:
        raise RequestError(
            f"{INPUT} needs a shape: 1 to {MAX_DIMENSIONS} sizes, none negative", param=INPUT
        )
    if not request.raw_input_contents:
        elements = list(tensor.contents.bytes_contents)
    elif len(request.raw_input_contents) == 1 and not tensor.HasField("contents"):
        elements = _unpacked(request.raw_input_contents[0])
    else:
        raise RequestError("send contents, or raw_input_contents for each input", param=INPUT)
    if len(elements) != math.prod(tensor.shape):
        raise RequestError(
            f"{INPUT} has {len(elements)} texts; its shape says {math.prod(tensor.shape)}",
            param=INPUT,
        )
    if not 1 <= len(elements) <= MAX_PROMPTS:
        raise RequestError(f"send 1 to {MAX_PROMPTS} texts in one call", param=INPUT)
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise RequestError(f"{INPUT} must be UTF-8", param=INPUT) from None


def _unpacked(raw: bytes) -> list[bytes]:
    elements, at = [], 0
    while at < len(raw):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw) or start > len(raw):
            raise RequestError(f"{INPUT}: a length goes beyond raw_input_contents", param=INPUT)
        elements.append(raw[start:at])
    return elements


def _sampling(
    parameters: Mapping[str, pb.InferParameter], model: ServedModel
) -> tuple[SamplingParams, CallOptions]:
    """How to sample, and the other options. Raises RequestError naming a parameter."""
    given: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind else None
        if name in _FRACTIONS:
            given[name] = _fraction(name, value)
        elif name in _WHOLES:
            given[name] = _of_type(name, value, int, "a whole number")
        elif name in _FLAGS:
            given[name] = _of_type(name, value, bool, "true or false")
        elif name == "stop":
            given[name] = (_of_type(name, value, str, "a text"),)
        else:
            known = ", ".join((*_FRACTIONS, *_WHOLES, *_FLAGS, "stop"))
            raise RequestError(
                f"unknown parameter {_shown(name)}; known: {known}",
                param=_shown(name)[1:-1],
                code="unknown_parameter",
            )
    defaults = CallOptions()
    options = CallOptions(
        model=model.name,
        add_special_tokens=given.pop("add_special_tokens", defaults.add_special_tokens),
        skip_special_tokens=given.pop("skip_special_tokens", defaults.skip_special_tokens),
    )
    return model.sampling_defaults.params(given), options


def _fraction(name: str, value: Any) -> float:
    """A number, or the text of one, as clients send that know only the older parameter types."""
    try:
        if isinstance(value, str) and len(value) <= 32:
            return float(value)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number", param=name)
    return float(value)


def _of_type(name: str, value: Any, kind: type, words: str) -> Any:
    if type(value) is not kind:
        raise RequestError(f"{name} must be {words}", param=name)
    return value


def _refuse_parameters(parameters: Mapping[str, pb.InferParameter], where: str) -> None:
    for name in parameters:
        raise RequestError(
            f"{where}: unknown parameter {_shown(name)}", param=where, code="unknown_parameter"
        )


def _response(
    request: pb.ModelInferRequest, model: ServedModel, wanted: list[str], answers: list[_TextOutput]
) -> pb.ModelInferResponse:
    """The answers in the form, raw or not, in which the texts came."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=VERSION, id=request.id)
    for name in wanted:
        values = [answer.value(name) for answer in answers]
        shape = request.inputs[0].shape
        tensor = response.outputs.add(name=name, datatype=OUTPUTS[name], shape=shape)
        if request.raw_input_contents:
            response.raw_output_contents.append(b"".join(map(_packed, values)))
        elif OUTPUTS[name] == "BYTES":
            tensor.contents.bytes_contents.extend(values)
        else:
            tensor.contents.uint_contents.extend(values)
    return response


def _packed(value: bytes | int) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(4, "little")  # UINT32
    return len(value).to_bytes(_LENGTH_BYTES, "little") + value


def _shown(name: str) -> str:
    return ascii(name[:100])
