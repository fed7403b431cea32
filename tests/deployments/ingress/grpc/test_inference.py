"""The gRPC interface as foreign clients see it: stubs, health, reflection, hostile calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

import penstock.protos as generated
from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.grpc.health import MAX_WATCHERS
from penstock.deployments.ingress.grpc.inference import SERVICE
from penstock.deployments.ingress.grpc.server import start_server
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.serving import MODEL, ScriptedGrpc, reference_ids, slowed, tokenizer
from tests.deployments.waiting import eventually

PROMPT = "It was a bright morning, and"
SEEDED = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "What feeds the turbine?"}]
Code = grpc.StatusCode
Scripted = partial(ScriptedGrpc, inference_pb2_grpc.InferenceServiceStub)


@pytest.fixture(scope="module")
def stub(channel):
    return inference_pb2_grpc.InferenceServiceStub(channel)


def refused(call):
    """(status, catalogue code, parameter, details) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as failure:
        list(call) if hasattr(call, "__iter__") else call
    error = failure.value
    trailing = dict(error.trailing_metadata() or ())
    return error.code(), trailing.get("error-code"), trailing.get("error-param"), error.details()


def sampling(num_new=24, **changed):
    return pb.SamplingParams(max_tokens=num_new, **{**SEEDED, **changed})


def test_generate(stub):
    prompt_ids = tokenizer().encode(PROMPT)
    expected = reference_ids(prompt_ids, max_tokens=24, **SEEDED)
    for prompt in ({"text": PROMPT}, {"token_ids": pb.TokenIds(ids=prompt_ids)}):
        request = pb.GenerateRequest(sampling=sampling(), client_request_id="mine-1", **prompt)
        call = stub.Generate(request)
        answers = list(call)
        assert [i for answer in answers for i in answer.token_ids] == expected
        text = "".join(answer.text for answer in answers)
        assert text == tokenizer().decode(expected, skip_special_tokens=True)
        first, last = answers[0], answers[-1]
        assert first.request_id == dict(call.initial_metadata())["x-request-id"]
        assert first.client_request_id == "mine-1"
        assert not any(answer.request_id for answer in answers[1:])
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert last.usage.prompt_tokens == len(prompt_ids)
        assert last.usage.completion_tokens == 24
        assert not any(answer.finish_reason for answer in answers[:-1])
        assert len(answers) > 12


def test_the_priority_arrives():
    with Scripted(FinishReason.STOP) as scripted:
        list(scripted.stub.Generate(pb.GenerateRequest(text="a", priority=7)))
        list(scripted.stub.Chat(pb.ChatRequest(messages=MESSAGES, priority=100)))
        list(scripted.stub.Generate(pb.GenerateRequest(text="a")))
        assert [each.priority for each in scripted.backend.requests] == [7, 100, 0]
        for wrong in (-1, 101):
            request = pb.GenerateRequest(text="a", priority=wrong)
            status, _, param, details = refused(scripted.stub.Generate(request))
            assert (status, param) == (Code.INVALID_ARGUMENT, "priority")
            assert str(wrong) in details


def test_chat(stub):
    rendered = tokenizer().render_chat(MESSAGES)
    ids = tokenizer().encode(rendered, add_special_tokens=False)
    expected = reference_ids(ids, max_tokens=24, **SEEDED)
    answers = list(stub.Chat(pb.ChatRequest(messages=MESSAGES, sampling=sampling())))
    assert [i for answer in answers for i in answer.token_ids] == expected
    assert answers[-1].usage.prompt_tokens == len(ids)


def test_every_sampling_field_arrives():
    values = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "seed": -(2**63),
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {7: -100.0, 8: 1.5},
        "allowed_token_ids": [5, 7, 8],
        "bad_words": ["mill"],
        "logprobs": 3,
        "prompt_logprobs": 2,
        "include_stop_str_in_output": True,
        "context_policy": "sink_window",
        "sinks": 3,
        "window": 48,
        "roll": 5,
        "moe_mode": "exact",
        "speculate": False,
    }
    shapes = pb.SamplingParams.DESCRIPTOR.oneofs_by_name["structured"].fields
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert set(values) == names - {field.name for field in shapes}
    elsewhere = {"bad_words", "include_stop_str_in_output"}  # tested by what they do
    with Scripted(FinishReason.STOP) as scripted:
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**values))
        list(scripted.stub.Generate(request))
        list(scripted.stub.Generate(pb.GenerateRequest(text="a")))
        given, default = (each.params for each in scripted.backend.requests)
        for name in values.keys() - elsewhere:
            got = getattr(given, name)
            got = dict(got) if name == "logit_bias" else got
            assert (list(got) if isinstance(got, tuple) else got) == values[name], name
        assert given.bad_words_ids
        assert default.seed is not None  # drawn, so that a stream can continue elsewhere
        assert default == type(default)(seed=default.seed)


def test_a_stop_string(stub):
    whole = "".join(
        answer.text
        for answer in stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling(40)))
    )
    stop = whole[9:15]
    answers = list(
        stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling(40, stop=[stop])))
    )
    assert "".join(answer.text for answer in answers) == whole[: whole.index(stop)]
    assert answers[-1].finish_reason == pb.FINISH_REASON_STOP


def test_tokenize_and_detokenize(stub):
    text = "naïve 水门 👩‍👩‍👧 <|im_end|>"
    ids = tokenizer().encode(text)
    answer = stub.Tokenize(pb.TokenizeRequest(text=text))
    assert list(answer.token_ids) == ids
    assert answer.max_model_len == 512
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "<|endoftext|>" + text
    hidden = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
    assert hidden.text == text.removesuffix("<|im_end|>")


def test_list_models(stub):
    (model,) = stub.ListModels(pb.ListModelsRequest()).models
    assert (model.name, model.max_model_len, model.vocab_size) == (MODEL, 512, 8192)
    assert model.has_chat_template


# Endings before the end


@pytest.fixture
def slow_serving(serving, monkeypatch):
    """What runs has not ended when a test goes on."""
    slowed(serving.backend.engine, monkeypatch)
    return serving


def test_a_cancelled_call_frees_its_blocks(slow_serving, stub):
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(400))
    call = stub.Generate(request)
    next(call)
    assert slow_serving.backend.num_live_blocks > 0
    call.cancel()
    eventually(lambda: slow_serving.backend.num_live_blocks == 0)


def test_a_closed_channel_frees_its_blocks(slow_serving):
    with grpc.insecure_channel(slow_serving.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        next(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling(400))))
        assert slow_serving.backend.num_live_blocks > 0
    eventually(lambda: slow_serving.backend.num_live_blocks == 0)


def test_a_call_can_be_cancelled_while_nothing_comes():
    with Scripted(30.0) as scripted:
        call = scripted.stub.Generate(pb.GenerateRequest(text="a"))
        eventually(lambda: scripted.backend.requests)
        call.cancel()
        eventually(lambda: scripted.backend.num_closed == 1)


def test_cancel_by_id(stub, slow_serving):
    call = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling(400)))
    request_id = dict(call.initial_metadata())["x-request-id"]
    next(call)
    assert not stub.Cancel(pb.CancelRequest(request_id=request_id[:-1])).cancelled
    assert stub.Cancel(pb.CancelRequest(request_id=request_id)).cancelled
    *_, last = list(call)
    assert last.finish_reason == pb.FINISH_REASON_ABORT
    assert 0 < last.usage.completion_tokens < 400
    assert not stub.Cancel(pb.CancelRequest(request_id=request_id)).cancelled
    eventually(lambda: slow_serving.backend.num_live_blocks == 0)


def test_the_deadline_of_the_client_is_kept():
    with Scripted([5], 30.0) as scripted:
        while not scripted.backend.requests:  # where the machine stands still, none comes in time
            call = scripted.stub.Generate(pb.GenerateRequest(text="a"), timeout=0.3)
            assert refused(call)[0] is Code.DEADLINE_EXCEEDED
        eventually(lambda: scripted.backend.num_closed == len(scripted.backend.requests))


# Refusals


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "missing_parameter", "prompt"),
        (pb.GenerateRequest(text=""), Code.INVALID_ARGUMENT, "invalid_value", "prompt"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])),
            Code.INVALID_ARGUMENT,
            "invalid_value",
            "prompt",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[8192])),
            Code.INVALID_ARGUMENT,
            "invalid_value",
            "prompt",
        ),
        (pb.GenerateRequest(text="a", model="b"), Code.NOT_FOUND, "model_not_found", "model"),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=512)),
            Code.INVALID_ARGUMENT,
            "context_length_exceeded",
            "max_tokens",
        ),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=float("inf"))),
            Code.INVALID_ARGUMENT,
            "invalid_value",
            "temperature",
        ),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop=["x"] * 17)),
            Code.INVALID_ARGUMENT,
            "invalid_value",
            "stop",
        ),
        (
            pb.GenerateRequest(text="a", client_request_id="a b"),
            Code.INVALID_ARGUMENT,
            "invalid_value",
            "client_request_id",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(stub, request_, status, code, param):
    got_status, got_code, got_param, details = refused(stub.Generate(request_))
    assert (got_status, got_code, got_param) == (status, code, param)
    assert details


def test_chat_refusals(stub):
    bad = pb.ChatRequest(messages=[{"role": "root", "content": "a"}])
    for request in (pb.ChatRequest(), bad):
        status, code, param, _ = refused(stub.Chat(request))
        assert (status, code, param) == (Code.INVALID_ARGUMENT, "invalid_value", "messages")


def test_unary_refusals(stub):
    with pytest.raises(grpc.RpcError) as failure:
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**6]))
    assert failure.value.code() is Code.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as failure:
        stub.Tokenize(pb.TokenizeRequest(text="a", model="b"))
    assert failure.value.code() is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("script", "status", "code", "num_before"),
    [
        (("overloaded",), Code.RESOURCE_EXHAUSTED, "overloaded", 0),
        (([5], "numerical_error"), Code.DATA_LOSS, "numerical_error", 1),
        (([5], RuntimeError("/secret/path")), Code.INTERNAL, "internal_error", 1),
        (([5],), Code.UNAVAILABLE, "worker_lost", 1),
    ],
)
def test_failures_have_a_status_and_leak_nothing(script, status, code, num_before):
    with Scripted(*script) as scripted:
        call, answers = scripted.stub.Generate(pb.GenerateRequest(text="a")), []
        with pytest.raises(grpc.RpcError) as failure:
            answers.extend(call)
        assert failure.value.code() is status
        trailing = dict(failure.value.trailing_metadata())
        assert trailing["error-code"] == code
        assert trailing["request-id"] == dict(call.initial_metadata())["x-request-id"]
        assert "secret" not in failure.value.details()
        assert scripted.backend.num_closed == 1


def test_large_and_broken_messages(serving, channel, stub):
    too_large = pb.TokenizeRequest(text="a" * (MAX_BODY_BYTES + 1))
    with pytest.raises(grpc.RpcError) as failure:
        stub.Tokenize(too_large)
    assert failure.value.code() is Code.RESOURCE_EXHAUSTED
    raw = channel.unary_unary(f"/{SERVICE}/Tokenize", lambda data: data, lambda data: data)
    for broken in (b"\xff\xff\xff", b"\x12\x02\xff\xfe"):  # no message; text that is no UTF-8
        with pytest.raises(grpc.RpcError) as failure:
            raw(broken)
        assert "Traceback" not in failure.value.details()
    assert stub.ListModels(pb.ListModelsRequest()).models


# Health, reflection, keys


def test_the_watchers_of_health_have_a_bound():
    """They need no key, and each wakes the event loop."""
    with Scripted([5]) as scripted:
        health = health_pb2_grpc.HealthStub(scripted.channel)
        request = health_pb2.HealthCheckRequest()
        watchers = [health.Watch(request) for _ in range(MAX_WATCHERS)]
        for each in watchers:
            next(each)
        with pytest.raises(grpc.RpcError) as refusal:
            next(health.Watch(request))
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        watchers[0].cancel()

        def watches() -> bool:
            try:
                return bool(next(health.Watch(request)))
            except grpc.RpcError:
                return False

        eventually(watches)
        for each in watchers:
            each.cancel()


def test_health_follows_the_backend():
    with Scripted([5]) as scripted:
        health = health_pb2_grpc.HealthStub(scripted.channel)
        for service in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        scripted.backend.is_ready = False
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status = health.Check(health_pb2.HealthCheckRequest()).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as failure:
            health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert failure.value.code() is Code.NOT_FOUND
        unknown = next(health.Watch(health_pb2.HealthCheckRequest(service="other")))
        assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    names = [message.name for message in database.FindFileContainingSymbol(SERVICE).message_type]
    assert "GenerateRequest" in names


def test_every_method_but_health_wants_a_key():
    with Scripted([5], FinishReason.STOP, api_keys=("right",)) as scripted:
        methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "right"),)):
            for method in methods:
                call = scripted.channel.stream_stream(
                    f"/{SERVICE}/{method.name}", lambda data: data, lambda data: data
                )
                status, code, _, _ = refused(call(iter([b""]), metadata=metadata, timeout=10))
                assert (status, code) == (Code.UNAUTHENTICATED, "invalid_api_key"), method.name
        with pytest.raises(grpc.RpcError) as failure:
            ProtoReflectionDescriptorDatabase(scripted.channel).get_services()
        assert failure.value.code() is Code.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(scripted.channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status
        key = (("authorization", "Bearer right"),)
        assert list(scripted.stub.Generate(pb.GenerateRequest(text="a"), metadata=key))
        assert scripted.stub.ListModels(pb.ListModelsRequest(), metadata=key).models


def test_cancel_is_for_the_same_key_only():
    with Scripted([5], 30.0, api_keys=("mine", "yours")) as scripted:
        mine, yours = ((("authorization", f"Bearer {key}"),) for key in ("mine", "yours"))
        call = scripted.stub.Generate(pb.GenerateRequest(text="a"), metadata=mine)
        request = pb.CancelRequest(request_id=next(call).request_id)
        assert not scripted.stub.Cancel(request, metadata=yours).cancelled
        assert scripted.stub.Cancel(request, metadata=mine).cancelled
        assert next(call).finish_reason == pb.FINISH_REASON_ABORT


def test_two_servers_share_a_port(serving):
    """As several ingress replicas on one machine do."""

    async def share():
        second = await start_server(serving.core, serving.grpc_target)
        port = second.port
        await second.stop(0)
        return port

    assert f"127.0.0.1:{asyncio.run(share())}" == serving.grpc_target


def test_the_generated_code_is_what_the_protos_say():
    program = Path(generated.__file__).with_name("generate.py")
    check = subprocess.run(
        [sys.executable, str(program), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr
