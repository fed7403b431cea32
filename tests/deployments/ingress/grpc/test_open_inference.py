"""The Open Inference Protocol as a foreign client sees it."""

from __future__ import annotations

import importlib.metadata
import struct
from functools import partial

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from penstock.deployments.ingress.grpc.open_inference import SERVICE
from penstock.protos.inference import open_inference_pb2 as pb
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.serving import MODEL, ScriptedGrpc, reference_ids, tokenizer
from tests.deployments.waiting import eventually

PROMPTS = ["It was a bright morning, and", "The sea", "Ah, my dear – ü"]
Code = grpc.StatusCode
# Of the published standard: message (and oneof) fields with their numbers.
STANDARD = {
    "ModelInferRequest": {
        **{"model_name": 1, "model_version": 2, "id": 3, "parameters": 4},
        **{"inputs": 5, "outputs": 6, "raw_input_contents": 7},
    },
    "ModelInferResponse": {
        **{"model_name": 1, "model_version": 2, "id": 3, "parameters": 4},
        **{"outputs": 5, "raw_output_contents": 6},
    },
    "ModelMetadataResponse": {
        **{"name": 1, "versions": 2, "platform": 3, "inputs": 4, "outputs": 5},
    },
    "InferParameter": {
        **{"bool_param": 1, "int64_param": 2, "string_param": 3},
        **{"double_param": 4, "uint64_param": 5},
    },
    "InferTensorContents": {
        **{"bool_contents": 1, "int_contents": 2, "int64_contents": 3, "uint_contents": 4},
        **{"uint64_contents": 5, "fp32_contents": 6, "fp64_contents": 7, "bytes_contents": 8},
    },
    "ServerMetadataResponse": {"name": 1, "version": 2, "extensions": 3},
    "ModelReadyRequest": {"name": 1, "version": 2},
}
Scripted = partial(ScriptedGrpc, open_inference_pb2_grpc.GRPCInferenceServiceStub)


@pytest.fixture(scope="module")
def stub(channel):
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def param(value):
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return pb.InferParameter(**{kinds[type(value)]: value})


def tensor(texts, **changed):
    given = {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)]} | changed
    contents = pb.InferTensorContents(bytes_contents=[text.encode() for text in texts])
    return pb.ModelInferRequest.InferInputTensor(contents=contents, **given)


def infer(texts=PROMPTS[:1], *, parameters=None, **changed):
    given = {"max_tokens": 8, "seed": 11, "ignore_eos": True} | (parameters or {})
    fields = {"model_name": MODEL, "inputs": [tensor(texts)]} | changed
    return pb.ModelInferRequest(
        parameters={name: param(value) for name, value in given.items()}, **fields
    )


def expected(prompt, num_new=8):
    prompt_ids = tokenizer().encode(prompt)
    ids = reference_ids(prompt_ids, max_tokens=num_new, seed=11, ignore_eos=True)
    return tokenizer().decode(ids, skip_special_tokens=True).encode()


def values(response):
    """The contents of each output by name."""
    return {
        output.name: list(output.contents.bytes_contents or output.contents.uint_contents)
        for output in response.outputs
    }


def refused(call):
    """(status, catalogue code, parameter) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as failure:
        call()
    trailing = dict(failure.value.trailing_metadata() or ())
    return failure.value.code(), trailing.get("error-code"), trailing.get("error-param")


def test_live_ready_and_metadata(stub):
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name=MODEL)).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="1")).ready
    server = stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, server.version) == ("penstock", importlib.metadata.version("penstock"))
    model = stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert (model.name, list(model.versions)) == (MODEL, ["1"])
    assert [(each.name, each.datatype, each.shape) for each in model.inputs] == [
        ("text_input", "BYTES", [-1])
    ]
    given = stub.ModelInfer(infer())
    assert [(each.name, each.datatype) for each in model.outputs] == [
        (each.name, each.datatype) for each in given.outputs
    ]


def test_readiness_follows_the_backend():
    with Scripted() as server:
        server.backend.is_ready = False
        assert server.stub.ServerLive(pb.ServerLiveRequest()).live
        assert not server.stub.ServerReady(pb.ServerReadyRequest()).ready
        assert not server.stub.ModelReady(pb.ModelReadyRequest(name=MODEL)).ready


def test_texts(stub):
    for shape in ([3], [3, 1], [1, 3]):
        call = infer(PROMPTS, inputs=[tensor(PROMPTS, shape=shape)], id="mine-1")
        response = stub.ModelInfer(call)
        assert values(response) == {
            "text_output": [expected(prompt) for prompt in PROMPTS],
            "finish_reason": [b"length"] * 3,
            "num_input_tokens": [len(tokenizer().encode(prompt)) for prompt in PROMPTS],
            "num_output_tokens": [8] * 3,
        }
        assert all(list(output.shape) == shape for output in response.outputs)
        assert (response.id, response.model_name, response.model_version) == ("mine-1", MODEL, "1")
        assert not response.raw_output_contents


def test_only_the_requested_outputs(stub):
    wanted = pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")
    response = stub.ModelInfer(infer(outputs=[wanted]))
    assert values(response) == {"text_output": [expected(PROMPTS[0])]}


def test_raw_texts_come_back_raw(stub):
    elements = [prompt.encode() for prompt in PROMPTS]
    raw = b"".join(struct.pack("<I", len(each)) + each for each in elements)
    bare = tensor(PROMPTS)
    bare.ClearField("contents")
    response = stub.ModelInfer(infer(inputs=[bare], raw_input_contents=[raw]))
    texts, reasons, num_in, num_out = response.raw_output_contents
    answers = [expected(prompt) for prompt in PROMPTS]
    assert texts == b"".join(struct.pack("<I", len(each)) + each for each in answers)
    assert reasons == 3 * (struct.pack("<I", 6) + b"length")
    lengths = [len(tokenizer().encode(prompt)) for prompt in PROMPTS]
    assert struct.unpack("<3I", num_in) == tuple(lengths)
    assert struct.unpack("<3I", num_out) == (8, 8, 8)
    assert not any(output.HasField("contents") for output in response.outputs)


def test_every_parameter_arrives():
    given = {
        **{"temperature": 0.5, "top_p": "0.25", "min_p": 0, "top_k": 7, "seed": -3},
        **{"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop": "ab"},
        **{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        **{"add_special_tokens": False, "skip_special_tokens": False},
    }
    with Scripted([5], FinishReason.STOP) as server:
        server.stub.ModelInfer(infer(parameters=given))
        (request,) = server.backend.requests
    params = request.params
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.25, 0.0)
    assert (params.top_k, params.seed, params.stop) == (7, -3, ("ab",))
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (9, 2, True)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.5, 0.5, -0.5)
    bare = tokenizer().encode(PROMPTS[0], add_special_tokens=False)
    assert list(request.prompt_ids) == bare


RAW = {"raw_input_contents": [b"\x05\x00\x00\x00abc"], "inputs": [tensor(["abc"])]}
RAW["inputs"][0].ClearField("contents")
OUTPUT = pb.ModelInferRequest.InferRequestedOutputTensor


@pytest.mark.parametrize(
    ("changed", "code", "at"),
    [
        ({"model_name": "b"}, "model_not_found", "model"),
        ({"model_version": "2"}, "model_not_found", "version"),
        ({"id": "a b"}, "invalid_value", "id"),
        ({"inputs": []}, "missing_parameter", "inputs"),
        ({"inputs": [tensor(["a"]), tensor(["a"])]}, "missing_parameter", "inputs"),
        ({"inputs": [tensor(["a"], name="image")]}, "unknown_parameter", "inputs"),
        ({"inputs": [tensor(["a"], datatype="FP32")]}, "invalid_value", "text_input"),
        ({"inputs": [tensor(["a"], shape=[2])]}, "invalid_value", "text_input"),
        ({"inputs": [tensor(["a"], shape=[])]}, "invalid_value", "text_input"),
        ({"inputs": [tensor(["a"], shape=[-1, -1])]}, "invalid_value", "text_input"),
        ({"inputs": [tensor(["a"], shape=[2**62] * 9)]}, "invalid_value", "text_input"),
        ({"inputs": [tensor([])]}, "invalid_value", "text_input"),
        ({"inputs": [tensor(["a"] * 65)]}, "invalid_value", "text_input"),
        ({"inputs": [tensor([""])]}, "invalid_value", "prompt"),
        (RAW, "invalid_value", "text_input"),
        ({"raw_input_contents": [b"\x00"]}, "invalid_value", "text_input"),
        ({"outputs": [OUTPUT(name="logits")]}, "invalid_value", "outputs"),
        ({"outputs": [OUTPUT(name="text_output")] * 2}, "invalid_value", "outputs"),
        ({"parameters": {"temperature": 1000.0}}, "invalid_value", "temperature"),
        ({"parameters": {"temperature": "hot"}}, "invalid_value", "temperature"),
        ({"parameters": {"temperature": "nan"}}, "invalid_value", "temperature"),
        ({"parameters": {"top_k": True}}, "invalid_value", "top_k"),
        ({"parameters": {"ignore_eos": 1}}, "invalid_value", "ignore_eos"),
        ({"parameters": {"max_tokens": 100_000}}, "context_length_exceeded", "max_tokens"),
        ({"parameters": {"priority": 1}}, "unknown_parameter", "priority"),
    ],
)
def test_refusals(stub, changed, code, at):
    if changed.get("inputs") and list(changed["inputs"][0].contents.bytes_contents) == [b""]:
        changed = {**changed, "parameters": {"add_special_tokens": False}}
    status = Code.NOT_FOUND if code == "model_not_found" else Code.INVALID_ARGUMENT
    assert refused(lambda: stub.ModelInfer(infer(**changed))) == (status, code, at)


def test_broken_text(stub):
    broken = tensor(["a"])
    broken.contents.bytes_contents[0] = b"\xff\xfe"
    assert refused(lambda: stub.ModelInfer(infer(inputs=[broken])))[1:] == (
        "invalid_value",
        "text_input",
    )


def test_models_that_are_not_served(stub):
    for method, request in (
        (stub.ModelReady, pb.ModelReadyRequest(name="b")),
        (stub.ModelMetadata, pb.ModelMetadataRequest(name=MODEL, version="7")),
    ):
        assert refused(lambda call=method, message=request: call(message))[0] is Code.NOT_FOUND


def test_failures_have_a_status_and_leak_nothing():
    for step, status, code in (
        ("overloaded", Code.RESOURCE_EXHAUSTED, "overloaded"),
        (RuntimeError("/secret/path"), Code.INTERNAL, "internal_error"),
    ):
        with Scripted([5], step) as server:
            assert refused(lambda at=server: at.stub.ModelInfer(infer()))[:2] == (status, code)


def test_deadline_and_cancellation():
    with Scripted([5], 60.0) as server:
        while not server.backend.requests:  # where the machine stands still, none comes in time
            assert refused(lambda: server.stub.ModelInfer(infer(), timeout=0.3))[0] is (
                Code.DEADLINE_EXCEEDED
            )
        eventually(lambda: server.backend.num_closed == len(server.backend.requests))
        num_before = server.backend.num_closed
        call = server.stub.ModelInfer.future(infer())
        eventually(lambda: len(server.backend.requests) > num_before)
        call.cancel()
        eventually(lambda: server.backend.num_closed > num_before, what="the end of the generation")


def test_every_method_wants_a_key():
    with Scripted(
        [5],
        FinishReason.STOP,
        api_keys=["secret"],
    ) as server:
        stub = server.stub
        calls = [
            (stub.ServerLive, pb.ServerLiveRequest()),
            (stub.ServerReady, pb.ServerReadyRequest()),
            (stub.ModelReady, pb.ModelReadyRequest(name=MODEL)),
            (stub.ServerMetadata, pb.ServerMetadataRequest()),
            (stub.ModelMetadata, pb.ModelMetadataRequest(name=MODEL)),
            (stub.ModelInfer, infer()),
        ]
        assert len(calls) == len(pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods)
        for method, request in calls:
            assert refused(lambda call=method, message=request: call(message)) == (
                Code.UNAUTHENTICATED,
                "invalid_api_key",
                None,
            )
            assert method(request, metadata=(("authorization", "Bearer secret"),))


def test_reflection_and_health_know_the_service(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    found = database.FindFileContainingSymbol(SERVICE)
    assert found.package == "inference"
    health = health_pb2_grpc.HealthStub(channel)
    serving = health.Check(health_pb2.HealthCheckRequest(service=SERVICE)).status
    assert serving == health_pb2.HealthCheckResponse.SERVING


def test_names_and_numbers_are_those_of_the_standard():
    described = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(described)
    messages = {message.name: message for message in described.message_type}
    for name, fields in STANDARD.items():
        assert {field.name: field.number for field in messages[name].field} == fields
    nested = {each.name: each for each in messages["ModelInferRequest"].nested_type}
    numbers = {field.name: field.number for field in nested["InferInputTensor"].field}
    assert numbers == {"name": 1, "datatype": 2, "shape": 3, "parameters": 4, "contents": 5}
