"""Speculation as clients meet it: the same answers and counts, and what usage says of drafts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.deployments.client import Client
from penstock.workers.config import EngineConfig
from penstock.workers.engine.draft import load_draft
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.speculation.proposers import Suffix
from penstock.workers.weights.hub import resolve_model
from tests.deployments.serving import EngineBackend, Serving
from tests.workers.speculation.draft_steps import AllSteps
from tests.workers.speculation.proposers import Widest

PROMPT = "The river turned the wheel. The river turned the wheel. The river turned the"
NUM_NEW = 48


@pytest.fixture(scope="module", params=["suffix", "draft"])
def serving(request):
    """Drafts wherever something matches, or of the model in int4: by measured times it would depend
    on the machine."""
    config = EngineConfig(num_blocks=256, speculate=request.param, weights="fp32")
    model = load_model("builtin", weights="fp32", progress=False)
    draft = load_draft(config, resolve_model("builtin"), "cpu", model)
    drafts = (Suffix(), Widest())
    engine = Engine(config, model, speculation=drafts, draft=draft, draft_steps=AllSteps())
    backend = EngineBackend(engine)
    with Serving(backend) as made:
        yield made
    backend.stop()


def ask(serving: Serving, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{serving.base_url}/v1/completions", json={**body, **fields}, timeout=60
    ).json()
    assert "choices" in answer, answer
    found: dict[str, Any] = answer
    return found


def test_the_answer_is_the_same_and_usage_has_the_drafts(serving):
    plain, drafted = ask(serving, speculate=False), ask(serving)
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    details = drafted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > NUM_NEW / 4
    assert details["rejected_prediction_tokens"] >= 0
    assert drafted["usage"]["completion_tokens"] == NUM_NEW
    assert set(plain["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 5},
        {"logprobs": 2, "n": 2, "seed": 1, "temperature": 0.7},
        {"stop_token_ids": [5, 9, 260], "min_tokens": 7, "ignore_eos": False},
        {"frequency_penalty": 1.0, "return_token_ids": True},
    ],
)
def test_parameters_change_nothing(serving, fields):
    plain, drafted = ask(serving, speculate=False, **fields), ask(serving, **fields)
    assert plain["choices"] == drafted["choices"]
    for each in (plain, drafted):
        del each["usage"]["completion_tokens_details"]
        del each["usage"]["prompt_tokens_details"]  # the second finds the prompt computed
    assert plain["usage"] == drafted["usage"]


def test_a_stop_string_within_a_burst_ends_the_answer_there(serving):
    """At every place of the answer: text, reason and counts are those without drafts."""
    text = ask(serving, speculate=False)["choices"][0]["text"]
    for at in range(0, len(text) - 6, 9):
        stop = text[at : at + 5]
        plain, drafted = (ask(serving, stop=[stop], speculate=how) for how in (False, None))
        assert plain["choices"] == drafted["choices"]
        assert plain["usage"]["completion_tokens"] == drafted["usage"]["completion_tokens"]


def test_over_grpc(serving):
    options: dict[str, Any] = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    with Client(serving.grpc_target) as client:
        plain = list(client.generate(PROMPT, speculate=False, **options))
        drafted = list(client.generate(PROMPT, **options))
    assert "".join(p.text for p in plain) == "".join(p.text for p in drafted)
    assert plain[-1].usage is not None and drafted[-1].usage is not None
    assert (plain[-1].usage.draft_tokens, plain[-1].usage.accepted_draft_tokens) == (0, 0)
    assert drafted[-1].usage.draft_tokens >= drafted[-1].usage.accepted_draft_tokens > 0
