"""Two models behind one ingress: each front end picks by name, and each answers as it does alone.

The built-in models have different tokenizers, so a mix-up gives other ids.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.client import Client
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.http.in_process import InProcessTarget
from penstock.deployments.options import ANY_NAME
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1.inference_pb2_grpc import InferenceServiceStub
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import FinishReason, Request, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.deployments.serving import (
    MODEL,
    EngineBackend,
    ScriptedBackend,
    Serving,
    tokenizer,
)
from tests.deployments.serving import model as dense_model

MOE = "builtin-moe"
PROMPT = "The river was"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]


@functools.cache
def moe_model() -> Any:
    return load_model(resolve_model(MOE), weights="fp32", progress=False)


@functools.cache
def moe_tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(MOE))


def tokenizer_of(name: str) -> Tokenizer:
    return tokenizer() if name == MODEL else moe_tokenizer()


def engine_of(name: str) -> Engine:
    model = dense_model() if name == MODEL else moe_model()
    return Engine(EngineConfig(num_blocks=256, max_num_seqs=8), model)


@functools.cache
def alone(name: str, prompt: str = PROMPT, max_tokens: int = 12) -> tuple[int, ...]:
    """The greedy answer of that model's engine, with nothing else in its process's way."""
    engine = engine_of(name)
    ids = tuple(tokenizer_of(name).encode(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(Request("alone", ids, params))
    found: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            found += delta.token_ids
    return tuple(found)


def text_of(name: str) -> str:
    return tokenizer_of(name).decode(alone(name), skip_special_tokens=True)


def moe_runtime(backend: Any, *other_names: str, **options: Any) -> ModelRuntime:
    return ModelRuntime(
        moe_tokenizer(),
        backend,
        model_name=MOE,
        other_names=other_names,
        vocab_size=moe_model().config.vocab_size,
        max_model_len=256,
        **options,
    )


@pytest.fixture(scope="module")
def two() -> Iterator[Serving]:
    """The first model is known as `small`, too; the second as `big`, and by any other name."""
    first, second = EngineBackend(engine_of(MODEL)), EngineBackend(engine_of(MOE))
    moe = moe_runtime(second, "big", ANY_NAME)
    with Serving(first, other_names=("small",), further=[moe]) as serving:
        yield serving
    first.stop()
    second.stop()


@dataclass
class Pair:
    """Two models over scripts."""

    serving: Serving
    first: ScriptedBackend
    second: ScriptedBackend

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.serving.base_url + path, timeout=30)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.serving.base_url + path, json=body, timeout=30)


@pytest.fixture
def pair() -> Iterator[Pair]:
    first = ScriptedBackend([5], FinishReason.LENGTH)
    second = ScriptedBackend([6], FinishReason.LENGTH)
    defaults = SamplingDefaults({"temperature": 0.25})
    moe = moe_runtime(second, "big", sampling_defaults=defaults)
    with Serving(first, other_names=("small",), further=[moe]) as serving:
        yield Pair(serving, first, second)


def streamed(serving: Serving, name: str) -> tuple[str, set[str]]:
    """The text of a streamed completion, and the names of the model in its events."""
    body = {"model": name, "prompt": PROMPT, "stream": True, **GREEDY}
    text, names = "", set()
    with httpx.stream(
        "POST", f"{serving.base_url}/v1/completions", json=body, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                names.add(event["model"])
                text += event["choices"][0]["text"]
    return text, names


def test_streams_of_both_at_a_time_are_those_of_each_alone(two: Serving) -> None:
    assert alone(MODEL) != alone(MOE)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = {name: pool.submit(streamed, two, name) for name in (MODEL, MOE, "small", "big")}
    for name, real in ((MODEL, MODEL), ("small", MODEL), (MOE, MOE), ("big", MOE)):
        assert got[name].result() == (text_of(real), {real})


def test_grpc_answers_with_the_ids_of_the_model_that_is_named(two: Serving) -> None:
    for name, real in ((MODEL, MODEL), ("", MODEL), (MOE, MOE), ("big", MOE), ("gpt-9", MOE)):
        with Client(two.grpc_target, model=name) as client:
            stream = client.generate(PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True)
            assert tuple(each for piece in stream for each in piece.token_ids) == alone(real)
    with grpc.insecure_channel(two.grpc_target) as channel:
        listed = InferenceServiceStub(channel).ListModels(pb.ListModelsRequest()).models
        assert [each.name for each in listed] == [MODEL, "small", MOE, "big"]
        assert [each.max_model_len for each in listed] == [512, 512, 256, 256]
        stub = GRPCInferenceServiceStub(channel)
        tensor = oip.ModelInferRequest.InferInputTensor(
            name="text_input", datatype="BYTES", shape=[1]
        )
        tensor.contents.bytes_contents.append(PROMPT.encode())
        request = oip.ModelInferRequest(model_name="big", inputs=[tensor])
        request.parameters["temperature"].double_param = 0.0
        request.parameters["max_tokens"].int64_param = 12
        request.parameters["ignore_eos"].bool_param = True
        answer = stub.ModelInfer(request)
        assert answer.model_name == MOE
        assert answer.outputs[0].contents.bytes_contents[0].decode() == text_of(MOE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ],
)
def test_every_dialect_renders_with_the_template_and_defaults_of_its_model(
    pair: Pair, path: str, body: dict[str, Any]
) -> None:
    for name, backend in ((MODEL, pair.first), ("small", pair.first), ("big", pair.second)):
        answer = pair.post(path, model=name, **body)
        real = MODEL if backend is pair.first else MOE
        assert (answer.status_code, answer.json()["model"]) == (200, real)
        request = backend.requests.pop()
        rendered = tokenizer_of(real).render_chat(HELLO, add_generation_prompt=True)
        ids = tokenizer_of(real).encode(rendered, add_special_tokens=False)
        assert request.prompt_ids == tuple(ids)
        assert request.params.temperature == (1.0 if real == MODEL else 0.25)
    assert not pair.first.requests and not pair.second.requests


def test_a_name_that_no_model_has_is_refused_with_all_names(pair: Pair) -> None:
    refused = pair.post("/v1/completions", model="gpt-9", prompt="a")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"].endswith(f"served: {MODEL}, small, {MOE}, big")
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
    ):
        assert pair.post(path, model="gpt-9", **body).status_code == 404
    with grpc.insecure_channel(pair.serving.grpc_target) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            list(InferenceServiceStub(channel).Generate(pb.GenerateRequest(model="x", text="a")))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    # Without a name: the first.
    assert pair.post("/v1/completions", prompt="a", max_tokens=1).json()["model"] == MODEL


def test_token_routes_have_the_tokenizer_of_the_model(two: Serving) -> None:
    for name in (MODEL, MOE):
        ids = tokenizer_of(name).encode(PROMPT)
        with httpx.Client(base_url=two.base_url, timeout=30) as http:
            asked = {"model": name, "prompt": PROMPT, "return_token_strs": True}
            got = http.post("/tokenize", json=asked).json()
            assert got["tokens"] == ids
            assert got["token_strs"] == tokenizer_of(name).pieces(ids)
            back = http.post("/detokenize", json={"model": name, "tokens": ids}).json()["prompt"]
            assert back == tokenizer_of(name).decode(ids, skip_special_tokens=False)
            chat = http.post("/tokenize", json={"model": name, "messages": HELLO}).json()
            body = {"model": name, "messages": HELLO}
            count = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
            assert chat["count"] == count
        with grpc.insecure_channel(two.grpc_target) as channel:
            request = pb.TokenizeRequest(model=name, text=PROMPT)
            assert list(InferenceServiceStub(channel).Tokenize(request).token_ids) == ids


def test_both_are_listed_and_found(two: Serving) -> None:
    listed = httpx.get(f"{two.base_url}/v1/models", timeout=30).json()["data"]
    assert [each["id"] for each in listed] == [MODEL, "small", MOE, "big"]
    for each in listed:
        found = httpx.get(f"{two.base_url}/v1/models/{each['id']}", timeout=30).json()
        assert found == each
        assert each["max_model_len"] == (512 if each["id"] in (MODEL, "small") else 256)


def test_a_batch_in_the_ingress_has_lines_of_both(two: Serving) -> None:
    async def send(name: str) -> Any:
        target = InProcessTarget(two.core)
        return await target.send("/v1/completions", {"model": name, "prompt": PROMPT, **GREEDY})

    for name in (MODEL, MOE):
        body = two.wait(send(name)).body
        assert (body["model"], body["choices"][0]["text"]) == (name, text_of(name))


def test_a_response_may_go_on_with_the_other_model(pair: Pair) -> None:
    first = pair.post("/v1/responses", model=MODEL, input="Hello", max_output_tokens=2).json()
    second = pair.post(
        "/v1/responses", model=MOE, input="More", previous_response_id=first["id"]
    ).json()
    assert (first["model"], second["model"]) == (MODEL, MOE)
    said = moe_tokenizer().decode(pair.second.requests[0].prompt_ids, skip_special_tokens=False)
    assert "Hello" in said and "More" in said
    assert pair.get(f"/v1/responses/{second['id']}").json()["model"] == MOE


def test_it_is_ready_once_both_had_a_worker_and_then_while_one_has(pair: Pair) -> None:
    def model_ready(name: str) -> bool:
        with grpc.insecure_channel(pair.serving.grpc_target) as channel:
            stub = GRPCInferenceServiceStub(channel)
            return bool(stub.ModelReady(oip.ModelReadyRequest(name=name)).ready)

    pair.second.is_ready = False
    for runtime in pair.serving.core.runtimes:
        runtime.was_ready = False  # as an ingress that starts
    starting = pair.get("/ready")
    assert starting.status_code == 503
    assert starting.json()["error"]["message"] == f"no worker is ready yet for {MOE}"
    pair.second.is_ready = True
    assert pair.get("/ready").json() == {"status": "ok"}
    pair.second.is_ready = False
    lacking = pair.get("/health")
    assert lacking.status_code == 200
    assert lacking.json() == {"status": "ok", "models_without_worker": MOE}
    assert (model_ready(MODEL), model_ready("big")) == (True, False)
    pair.first.is_ready = False
    gone = pair.get("/ready")
    assert gone.status_code == 503
    assert gone.json()["error"]["message"] == f"no worker is ready yet for {MODEL}, {MOE}"
