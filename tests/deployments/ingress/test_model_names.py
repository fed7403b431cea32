"""One model under several names: all front ends list and take them; answers bear the first."""

from __future__ import annotations

import grpc
import httpx
import pytest

from penstock.deployments.batch.lines import InputError, check_input
from penstock.deployments.config import config_from
from penstock.deployments.options import ANY_NAME
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1.inference_pb2_grpc import InferenceServiceStub
from tests.deployments.serving import MODEL, EngineBackend, Serving

NAMES = [MODEL, "other", "org/third"]
PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def backend():
    backend = EngineBackend()
    yield backend
    backend.stop()


@pytest.fixture(scope="module")
def named(backend):
    with Serving(backend, other_names=("other", "org/third")) as serving:
        yield serving


@pytest.fixture(scope="module")
def anyhow(backend):
    with Serving(backend, other_names=("other", ANY_NAME)) as serving:
        yield serving


def post(serving, path, name):
    body = {**PATHS[path], "model": name}
    return httpx.post(f"{serving.base_url}{path}", json=body, timeout=60)


@pytest.mark.parametrize("path", PATHS)
def test_every_api_takes_each_name_and_answers_with_the_first(named, path):
    for name in NAMES:
        answer = post(named, path, name)
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    refused = post(named, path, "fourth")
    assert refused.status_code == 404
    assert f"served: {', '.join(NAMES)}" in refused.json()["error"]["message"]


def test_every_name_is_listed_and_found(named):
    listed = httpx.get(f"{named.base_url}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == NAMES
    for name, model in zip(NAMES, listed, strict=True):
        assert httpx.get(f"{named.base_url}/v1/models/{name}", timeout=60).json() == model
    assert httpx.get(f"{named.base_url}/v1/models/fourth", timeout=60).status_code == 404


def test_grpc_lists_and_takes_them(named):
    with grpc.insecure_channel(named.grpc_target) as channel:
        listed = InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert [model.name for model in listed.models] == NAMES
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ModelMetadata(oip.ModelMetadataRequest(name="other")).name == MODEL
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelMetadata(oip.ModelMetadataRequest(name="fourth"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert "served: " + ", ".join(NAMES) in error.value.details()


def test_with_a_star_any_name_is_taken_and_the_star_is_not_listed(anyhow):
    assert post(anyhow, "/v1/completions", "gpt-5").json()["model"] == MODEL
    listed = httpx.get(f"{anyhow.base_url}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == [MODEL, "other"]


def test_the_schema_of_a_request_has_the_names(named, anyhow):
    for serving, names in ((named, NAMES), (anyhow, None)):
        document = httpx.get(f"{serving.base_url}/openapi.json", timeout=60).json()
        chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        (text,) = (each for each in chat["model"]["anyOf"] if each["type"] == "string")
        assert text.get("enum") == names


def test_a_line_of_a_batch_may_have_each_name(tmp_path):
    file = tmp_path / "in.jsonl"
    body = '{"model":"x","prompt":"a"}'
    file.write_text(f'{{"custom_id":"1","method":"POST","url":"/v1/completions","body":{body}}}')
    for models in (["a", "x"], ["a", ANY_NAME], None):
        with file.open("rb") as opened:
            assert check_input(opened, models=models).num_lines == 1
    with file.open("rb") as opened, pytest.raises(InputError):
        check_input(opened, models=["a", "b"])


@pytest.mark.parametrize(
    ("given", "name", "others"),
    [
        (None, "ckpt", ()),
        ("a", "a", ()),
        (["a"], "a", ()),
        (["a", "b", "a"], "a", ("b",)),
        ("*", "ckpt", ("*",)),
        (["*", "b"], "b", ("*",)),
        (["a", "*", "b"], "a", ("*", "b")),
        ([7], "7", ()),
    ],
)
def test_the_setting(given, name, others):
    config = config_from({"model": "org/ckpt", "served_model_name": given})
    assert (config.model_name, config.other_names) == (name, others)
