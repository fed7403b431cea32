"""The settings of the chat template, as the clients of each front end meet them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.config import config_from
from penstock.deployments.offline.llm import LLM
from penstock.deployments.offline.sampling_params import SamplingParams
from penstock.deployments.preflight import check_before_start
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason
from penstock.workers.text.chat_settings import load_tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.deployments.ports import free_port
from tests.deployments.serving import ScriptedBackend, Serving, tokenizer

TEMPLATE = (
    "{% for each in messages %}{{ each.content }}{% endfor %}{{ ' and' if think else ' or' }}"
)
HELLO = [{"role": "user", "content": "Hello"}]
THINK = '{"think": true}'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def server(template: str) -> Iterator[Serving]:
    options = EngineConfig(chat_template=template, default_chat_template_kwargs=THINK)
    of = load_tokenizer(resolve_model("builtin"), options)
    with Serving(ScriptedBackend([5], FinishReason.LENGTH), of=of) as server:
        yield server


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def test_every_front_end_renders_with_them(server: Serving) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/messages": {"messages": HELLO, "model": "builtin", "max_tokens": 4},
        "/v1/responses": {"input": "Hello"},
    }
    for path, body in bodies.items():
        assert httpx.post(server.base_url + path, json=body, timeout=30).status_code == 200
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        message = pb.Message(role="user", content="Hello")
        list(stub.Chat(pb.ChatRequest(messages=[message])))
    requests = server.backend.requests
    assert [each.prompt_ids for each in requests] == [ids("Hello and")] * 4


def test_the_requests_variables_go_first(server: Serving) -> None:
    server.backend.requests.clear()
    body = {"messages": HELLO, "chat_template_kwargs": {"think": False}}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert server.backend.requests[0].prompt_ids == ids("Hello or")
    body["chat_template_kwargs"] = {"effort": "low"}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert "it has think" in answer.json()["error"]["message"]


def test_scripts_take_them_too(template: str) -> None:
    settings: dict[str, Any] = {"num_blocks": 128, "max_num_seqs": 4, "threads": 1}
    asked = SamplingParams(max_tokens=1)
    with LLM(
        "builtin", chat_template=template, default_chat_template_kwargs={"think": True}, **settings
    ) as llm:
        (given,) = llm.chat(HELLO, asked, use_tqdm=False)
        (said,) = llm.chat(HELLO, asked, use_tqdm=False, chat_template_kwargs={"think": False})
    assert given.prompt_token_ids == list(ids("Hello and"))
    assert said.prompt_token_ids == list(ids("Hello or"))


def test_they_are_checked_before_the_start(template: str) -> None:
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    check_before_start(config_from({"chat_template": template, **ports}))
    for model in ("builtin", "org/name"):
        config = config_from({"model": model, "chat_template": "/nowhere.jinja", **ports})
        with pytest.raises(ConfigError, match=r"chat_template /nowhere\.jinja: there is no such"):
            check_before_start(config)
    for given, message in ({"effort": 1}, "effort: .* it has think"), ({"a": []}, "plain values"):
        with pytest.raises(ConfigError, match=message):
            check_before_start(
                config_from(
                    {
                        "chat_template": template,
                        "default_chat_template_kwargs": given,
                        **ports,
                    }
                )
            )


def test_processes_elsewhere_get_the_whole_path(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(template).parent)
    config = config_from({"chat_template": "chat.jinja"}).with_absolute_paths()
    assert config.engine.chat_template == str(Path(template).resolve())
