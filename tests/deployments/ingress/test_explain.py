"""`penstock explain`: what became of a request, from a real engine over a real channel to the CLI.

The pool of the engine is too small for what runs, so that requests are preempted, and others go on
for a while without a block.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
import torch

from penstock.deployments.cli.explain import explain_text
from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, TokenUsage
from penstock.deployments.ingress.core.history.recent_answers import AnswerRecord, RecentAnswers
from penstock.deployments.ingress.core.request_metrics import RequestTimes
from penstock.deployments.ingress.core.tracing import AnswerTrace
from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.config import EngineConfig
from penstock.workers.models.loader import load_model
from penstock.workers.request import SamplingParams
from penstock.workers.scheduling.commit_rule import BRANCHES
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.deployments.ingress import test_continuation as real

ALICE, BOB = "key-of-alice", "key-of-bob"
STARVED: dict[str, Any] = {"num_blocks": 24, "prefix_cache": False, "ridge_tokens": 6}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_model("builtin", weights="fp32", progress=False)


def node_of(model: Any, **settings: Any) -> real.Node:
    config = EngineConfig(
        weights="fp32", device="cpu", max_num_seqs=16, threads=1, **{**STARVED, **settings}
    )
    before, real.CONFIG = real.CONFIG, config
    try:
        return real.Node(model)
    finally:
        real.CONFIG = before


async def answered(core: Any, tenant: str, num: int, name: str) -> None:
    """`num` requests at once; they are called NAME0, NAME1, ..."""
    calls = [
        Call(
            f"The sea was {'very ' * 20}{i}",
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60),
            CallOptions(),
            CallContext(request_id=f"{name}{i}", principal=tenant),
        )
        for i in range(num)
    ]
    await asyncio.gather(*(real.answers(core, call, 1) for call in calls))


async def got(core: Any, name: str, key: str) -> httpx.Response:
    app = build_app(core, keys=ApiKeys((ALICE, BOB)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(
            f"/v1/penstock/requests/{name}", headers={"authorization": f"Bearer {key}"}
        )


@pytest.mark.parametrize("commit", ["deferred", "eager"])
def test_decisions_and_preemptions_reach_the_operator(model: Any, commit: str) -> None:
    node = node_of(model, kv_commit=commit)
    tokenizer = Tokenizer.load(resolve_model("builtin"))
    tenant = ApiKeys((ALICE, BOB)).caller(f"Bearer {ALICE}").tenant

    async def scenario() -> tuple[list[dict[str, Any]], list[httpx.Response], httpx.Response]:
        async with real.core_over([node], tokenizer) as core, asyncio.timeout(120):
            await answered(core, tenant, 8, "call")
            bodies = [(await got(core, f"call{i}", ALICE)).json() for i in range(8)]
            prefixes = ("chatcmpl-", "resp_", "rerank-", "score-")
            named = [await got(core, f"{each}call0", ALICE) for each in prefixes]
            return bodies, named, await got(core, "call0", BOB)

    try:
        bodies, by_body_id, foreign = asyncio.run(scenario())
        stats = node.engine.stats()
    finally:
        node.stop()
    assert all(each.json() == bodies[0] for each in by_body_id)
    assert foreign.status_code == 404 and "'call0'" in foreign.json()["error"]["message"]
    answers = [answer for body in bodies for answer in body["answers"]]
    assert [each["completion_tokens"] for each in answers] == [60] * 8
    assert {each["finish"] for each in answers} == {"length"}
    assert {each["worker"] for each in answers} == {node.channel.info.address}
    events = [event for each in answers for event in each["events"]]
    preempted = [each["about"] for each in events if each["name"] == "preempted"]
    decided = [each["about"] for each in events if each["name"] == "commit_decision"]
    assert len(preempted) == stats.num_preemptions > 0
    assert all(0 < each["tokens"] <= 200 for each in preempted)
    text = "\n".join(explain_text(body) for body in bodies)
    assert text.count("computed tokens lose their KV blocks") == len(preempted)
    assert "first token" in text and "ms a token" in text
    if commit == "eager":
        assert not decided and stats.deferral is None
        return
    assert stats.deferral is not None and stats.deferral.ridge_tokens == 6
    counts = stats.deferral.num_decisions
    assert set(counts) == set(BRANCHES) and sum(counts.values()) >= len(decided) > 0
    assert {each["branch"] for each in decided} <= {name for name, num in counts.items() if num}
    for each in decided:
        assert each["nt"] == 6 and each["is_pressed"] and each["td_s"] >= 0
        if each["branch"] == "cheaper":
            assert 0 < each["td_s"] < each["tl_s"]
        elif each["branch"] == "dearer":
            assert each["td_s"] >= each["tl_s"]
    assert f"nt {decided[0]['nt']:.0f}, td {decided[0]['td_s'] * 1e3:.2f} ms" in text


def test_a_request_that_runs_is_explained(model: Any) -> None:
    node = node_of(model, num_blocks=100)
    tokenizer = Tokenizer.load(resolve_model("builtin"))

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        async with real.core_over([node], tokenizer) as core, asyncio.timeout(60):
            call = Call(
                "The sea",
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1200),
                context=CallContext(request_id="slow"),
            )
            pieces = core.run_many(await core.prepare_choices(call, 1))
            async with contextlib.aclosing(pieces):
                await anext(pieces)
                runs = await got(core, "slow", ALICE)
                assert runs.status_code == 404, "it has no tenant of these keys"
                core.recent.of("slow")[0].tenant = (
                    ApiKeys((ALICE,)).caller(f"Bearer {ALICE}").tenant
                )
                runs = await got(core, "slow", ALICE)
            return runs.json(), (await got(core, "slow", ALICE)).json()

    try:
        runs, left = asyncio.run(scenario())
    finally:
        node.stop()
    assert runs["answers"][0]["finish"] is None and runs["answers"][0]["completion_tokens"] >= 1
    assert "runs" in explain_text(runs)
    assert left["answers"][0]["finish"] == "disconnect"
    assert left["answers"][0]["total_s"] >= runs["answers"][0]["total_s"]


def record(name: str) -> AnswerRecord:
    return AnswerRecord(name, "m", "", 0, AnswerTrace(), RequestTimes(0.0), TokenUsage(1))


def test_the_oldest_that_have_ended_are_forgotten_first() -> None:
    recent = RecentAnswers(most=4)
    records = {name: record(name) for name in "abcdef"}
    for name in "abcd":
        recent.begin(name, records[name])
    recent.end(records["b"], "stop")
    recent.begin("e", records["e"])
    assert [bool(recent.of(name)) for name in "abcde"] == [True, False, True, True, True]
    recent.begin("f", records["f"])  # of the older half none has ended: the oldest goes
    assert [bool(recent.of(name)) for name in "acdef"] == [False, True, True, True, True]
    recent.begin("f", record("f.1"))
    assert [each.request_id for each in recent.of("f")] == ["f", "f.1"]
