"""Fields of chat that other servers know: reasoning, usage in each chunk, answers that go on."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import pytest

from penstock.deployments.ingress.http.ignored_fields import HEADER, FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.template_fields import Effort, EffortLevel
from penstock.workers.request import FinishReason
from penstock.workers.text.reasoning import PUBLISHED
from tests.deployments.ingress.core.answers.models import model_of
from tests.deployments.serving import ScriptedBackend, Serving, reference_ids, tokenizer

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What feeds the turbine?"}]
SAID = "<think>\nThe river.\n</think>\n\nThe penstock."
# What a template reads, and what it writes of that.
SWITCH = "[{{ enable_thinking }}]"
LEVEL = "[{{ reasoning_effort }}]"
BOTH = "[{{ thinking }}|{{ reasoning_effort }}]"


def served(template: str | None, text: str = "Ja.", **options: Any) -> Serving:
    of = tokenizer() if template is None else model_of(f"{{{{ messages[0].content }}}}{template}")
    steps = ([token_id] for token_id in of.encode(text, add_special_tokens=False))
    backend = ScriptedBackend(*steps, FinishReason.STOP)
    return Serving(backend, of=of, fields=FieldPolicy("ignore"), max_model_len=1024, **options)


def post(server: Serving, path: str = CHAT, **body: Any) -> httpx.Response:
    with httpx.Client(base_url=server.base_url, timeout=30) as plain:
        answer = plain.post(path, json={"messages": MESSAGES, **body})
    assert answer.status_code == 200, answer.text
    return answer


def prompt_of(server: Serving) -> str:
    return server.core.named(None).tokenizer.decode(server.backend.requests[-1].prompt_ids)


@pytest.mark.parametrize(
    ("template", "body", "written"),
    [
        (SWITCH, {"reasoning_effort": "none"}, "[False]"),
        (SWITCH, {"reasoning_effort": "low"}, "[True]"),
        (SWITCH, {"reasoning": {"enabled": False}}, "[False]"),
        (LEVEL, {"reasoning_effort": "xhigh"}, "[high]"),
        (LEVEL, {"reasoning_effort": "minimal"}, "[low]"),
        (LEVEL, {"reasoning_effort": {"effort": "medium"}}, "[medium]"),
        (LEVEL, {"reasoning": {"effort": "high"}}, "[high]"),
        (BOTH, {"reasoning_effort": "medium"}, "[True|medium]"),
        (BOTH, {"reasoning_effort": "none"}, "[False|]"),
        (
            BOTH,
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            "[True|]",
        ),
    ],
)
def test_how_much_to_reason_reaches_the_template(
    template: str, body: dict[str, Any], written: str
) -> None:
    with served(template) as server:
        answer = post(server, **body)
        assert prompt_of(server).endswith(written)
        assert HEADER not in answer.headers
        counted = post(server, "/tokenize", **body).json()["tokens"]
        assert tuple(counted) == server.backend.requests[-1].prompt_ids


@pytest.mark.parametrize(
    ("path", "body", "written"),
    [
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "[False|]"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "[True|]"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, "[|]"),
        (
            "/v1/messages",
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            "[True|high]",
        ),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, "[False|]"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "[True|low]"),
        ("/v1/responses", {"reasoning": {}}, "[|]"),
    ],
)
def test_other_apis_say_it_too(path: str, body: dict[str, Any], written: str) -> None:
    about = {"input": "a"} if path == "/v1/responses" else {"messages": MESSAGES}
    about |= {"model": "builtin", "max_tokens": 4} if path == "/v1/messages" else {}
    with served(BOTH) as server, httpx.Client(base_url=server.base_url) as plain:
        answer = plain.post(path, json=about | body)
        assert answer.status_code == 200, answer.text
        assert prompt_of(server).endswith(written)


def test_a_variable_that_the_template_has_not_is_left_out() -> None:
    with served(SWITCH) as server:
        answer = post(server, chat_template_kwargs={"thinking": False, "enable_thinking": True})
        assert answer.headers[HEADER] == "chat_template_kwargs.thinking"
        assert prompt_of(server).endswith("[True]")


def test_levels_have_a_nearest_one() -> None:
    levels: tuple[EffortLevel, ...] = get_args(EffortLevel)
    assert levels == ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    told = [Effort(each, "a").variables(("reasoning_effort",)) for each in levels]
    names = ["low", "low", "low", "medium", "high", "high", "high"]
    assert told == [{"reasoning_effort": name} for name in names]
    assert Effort(None, "a").variables(("thinking", "reasoning_effort")) == {"thinking": True}
    assert Effort("high", "a").variables(("other",)) == {}
    assert IgnoredFields().names == ()


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_left_out_or_left_in(stream: bool) -> None:
    with served("<assistant>", SAID, marks=PUBLISHED[0]) as server:
        hidden = post(server, include_reasoning=False, stream=stream).text
        together = post(server, separate_reasoning=False, stream=stream).text
        apart = post(server, stream=stream).text
    assert "river" not in hidden.replace(" ", "") or "reasoning" not in hidden
    assert "reasoning_content" not in hidden and "reasoning_content" not in together
    assert "reasoning_content" in apart
    if not stream:
        content = json.loads(together)["choices"][0]["message"]["content"]
        assert content == SAID
        assert json.loads(hidden)["choices"][0]["message"]["content"] == "The penstock."


def test_usage_in_each_chunk() -> None:
    with served(None, "It feeds the turbine.") as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        text = post(server, stream=True, n=2, stream_options=options).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    *pieces, last = chunks
    assert last["choices"] == []
    for index in (0, 1):
        usages = [each["usage"] for each in pieces if each["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[0] == 1  # the role comes with the first token
        assert len(set(counts)) > 3
        assert counts[-1] == last["usage"]["completion_tokens"] // 2
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}


def test_an_answer_goes_on_with_the_last_message(serving: Serving, raw: httpx.Client) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is the"}]
    body = {"messages": begun, "temperature": 0, "max_tokens": 6}
    opened = tokenizer().render_chat(MESSAGES) + "It is the"
    ids = tokenizer().encode(opened, add_special_tokens=False)
    new = reference_ids(ids, max_tokens=6, temperature=0.0)
    known = len(tokenizer().decode(ids, skip_special_tokens=True))
    expected = tokenizer().decode([*ids, *new], skip_special_tokens=True)[known:]
    chat = raw.post(CHAT, json=body | {"continue_final_message": True}).json()
    assert chat["choices"][0]["message"]["content"] == expected
    assert chat["usage"]["prompt_tokens"] == len(ids)
    message = raw.post("/v1/messages", json=body | {"model": "builtin"}).json()
    assert message["content"][0]["text"] == expected
    counted = raw.post(
        "/v1/messages/count_tokens", json={"model": "builtin", "messages": begun}
    ).json()
    assert counted["input_tokens"] == len(ids)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "continue_final_message": True},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
    ],
)
def test_there_must_be_an_answer_to_go_on_with(raw: httpx.Client, body: dict[str, Any]) -> None:
    answer = raw.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
