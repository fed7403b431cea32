"""The model's own sampling parameters: by which API a request comes makes no difference.

Each front end is asked with a parameter, and without it. The oracles: `SamplingParams` written out,
and the engine driven directly with the same parameters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.config import config_from
from penstock.deployments.ingress.http.in_process import InProcessTarget
from penstock.deployments.offline.llm import LLM
from penstock.deployments.offline.sampling_params import SamplingParams as OfflineParams
from penstock.deployments.preflight import check_before_start
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.weights.hub import resolve_model
from tests.deployments.ports import free_port
from tests.deployments.serving import (
    EngineBackend,
    ScriptedBackend,
    Serving,
    reference_ids,
    tokenizer,
)

OWN: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
}
# What switches each off: a request that says so gets it, although it is also the API's default.
PLAIN = {name: getattr(SamplingParams(), name) for name in OWN}
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "responses": ("/v1/responses", {"input": "Hello"}),
    "messages": ("/v1/messages", {"messages": HELLO, "model": "builtin", "max_tokens": 9}),
}
FRONTS = [*BODIES, "batch", "grpc generate", "grpc chat", "open inference"]
NOT_OFFERED = {"messages": {"min_p", "repetition_penalty"}}  # by that API, to its requests


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    backend = ScriptedBackend([5], FinishReason.LENGTH)
    with Serving(backend, sampling_defaults=SamplingDefaults(OWN)) as server:
        yield server


def ask(server: Serving, front: str, given: dict[str, Any]) -> None:
    if front in BODIES:
        path, body = BODIES[front]
        answer = httpx.post(server.base_url + path, json={**body, **given}, timeout=30)
        assert answer.status_code == 200, answer.text
    elif front == "batch":
        path, body = BODIES["chat"]
        reply = server.wait(InProcessTarget(server.core).send(path, {**body, **given}))
        assert reply.status == 200, reply
    else:
        with grpc.insecure_channel(server.grpc_target) as channel:
            ask_grpc(channel, front, given)


def ask_grpc(channel: grpc.Channel, front: str, given: dict[str, Any]) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    sampling = pb.SamplingParams(**given)
    if front == "grpc chat":
        messages = [pb.Message(role="user", content="Hello")]
        list(stub.Chat(pb.ChatRequest(messages=messages, sampling=sampling)))
    elif front == "grpc generate":
        list(stub.Generate(pb.GenerateRequest(text="Hello", sampling=sampling)))
    else:
        request = oip.ModelInferRequest(model_name="builtin")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"Hello")
        for name, value in given.items():
            kind = "int64_param" if isinstance(value, int) else "double_param"
            setattr(request.parameters[name], kind, value)
        open_inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)


def arrived(server: Serving, front: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the worker gets, of those that models state."""
    server.backend.requests.clear()
    ask(server, front, given)
    (request,) = server.backend.requests
    return {name: getattr(request.params, name) for name in OWN}


@pytest.mark.parametrize("front", FRONTS)
def test_what_a_request_says_goes_first(server: Serving, front: str) -> None:
    assert arrived(server, front, {}) == OWN
    for name in OWN.keys() - NOT_OFFERED.get(front, set()):
        assert arrived(server, front, {name: PLAIN[name]}) == {**OWN, name: PLAIN[name]}
    said = {name: PLAIN[name] for name in OWN.keys() - NOT_OFFERED.get(front, set())}
    assert arrived(server, front, said) == {**OWN, **said}


@pytest.mark.parametrize("front", FRONTS)
def test_a_greedy_request_stays_greedy(server: Serving, front: str) -> None:
    assert arrived(server, front, {"temperature": 0.0}) == {**OWN, "temperature": 0.0}
    (request,) = server.backend.requests
    assert request.params.seed is None  # nothing is drawn


def test_a_response_says_how_it_was_sampled(server: Serving) -> None:
    def said(**given: Any) -> tuple[float, float]:
        answer = httpx.post(f"{server.base_url}/v1/responses", json={"input": "Hello", **given})
        return answer.json()["temperature"], answer.json()["top_p"]

    assert said() == (OWN["temperature"], OWN["top_p"])
    assert said(temperature=0.0, top_p=1.0) == (0.0, 1.0)


def test_minus_one_still_switches_top_k_off(server: Serving) -> None:
    assert arrived(server, "completions", {"top_k": -1})["top_k"] == 0


def test_clients_see_them(server: Serving) -> None:
    (listed,) = httpx.get(f"{server.base_url}/v1/models").json()["data"]
    assert listed["sampling_defaults"] == OWN
    assert httpx.get(f"{server.base_url}/v1/models/builtin").json() == listed


def model_with(folder: Path, stated: dict[str, Any]) -> Path:
    """The built-in model with this generation_config.json."""
    shutil.copytree(resolve_model("builtin"), folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    return folder


@pytest.fixture(scope="module")
def engine_server() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend, sampling_defaults=SamplingDefaults(OWN)) as server:
        yield server
    backend.stop()


def token_ids(server: Serving, **given: Any) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body | given, timeout=60)
    return list(answer.json()["choices"][0]["token_ids"])


PROMPT = "It was a bright morning, and"


def test_ids_are_those_of_the_same_parameters_said(engine_server: Serving) -> None:
    prompt_ids = tokenizer().encode(PROMPT)
    length = {"max_tokens": 24, "ignore_eos": True}
    expected = reference_ids(prompt_ids, **length, **OWN, seed=7)
    assert token_ids(engine_server, seed=7) == token_ids(engine_server, seed=7, **OWN) == expected
    plain = reference_ids(prompt_ids, **length, seed=7)
    assert token_ids(engine_server, seed=7, **PLAIN) == plain != expected
    greedy = reference_ids(prompt_ids, **length, temperature=0.0)
    said = {**PLAIN, "temperature": 0.0}
    assert token_ids(engine_server, **said) == greedy


def test_scripts_get_them_too(tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", OWN)
    settings = {"weights": "fp32", "num_blocks": 256, "max_num_seqs": 4, "threads": 1}
    asked = OfflineParams(seed=7, max_tokens=24, ignore_eos=True)
    prompt_ids, length = tokenizer().encode(PROMPT), {"max_tokens": 24, "ignore_eos": True}

    def ids(llm: LLM) -> list[int]:
        return llm.generate(PROMPT, asked, use_tqdm=False)[0].outputs[0].token_ids

    with LLM(str(folder), **settings) as llm:
        assert ids(llm) == reference_ids(prompt_ids, **length, **OWN, seed=7)
    with LLM(str(folder), generation_config="none", **settings) as llm:
        assert ids(llm) == reference_ids(prompt_ids, **length, seed=7)


def test_a_value_that_cannot_be_is_refused_before_the_start(tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", {"top_p": 1.5})
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    with pytest.raises(ConfigError, match=r"top_p must be a number in \(0, 1\]; got 1\.5.*none"):
        check_before_start(config_from({"model": str(folder), **ports}))
    check_before_start(config_from({"model": str(folder), "generation_config": "none", **ports}))
