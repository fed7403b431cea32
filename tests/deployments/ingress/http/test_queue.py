"""/v1/penstock/queue: with API keys, a caller sees the requests of its own key."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.security.api_keys import ApiKeys
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from tests.deployments.ingress.test_several_models import MOE, moe_runtime
from tests.deployments.serving import MODEL, ScriptedBackend, core_over

ALICE, BOB = "key-of-alice", "key-of-bob"


class Figures:
    num_learnt = 0


class Gate:
    """Answers as the gate does: with the first waiting requests of all tenants."""

    breaker_state, num_on_credit, num_asked, num_fallback = "closed", 0, 0, 0
    figures = Figures()

    def __init__(self) -> None:
        keys = ApiKeys((ALICE, BOB))
        self.names = {key: keys.caller(f"Bearer {key}").tenant for key in (ALICE, BOB)}

    async def explain(self, limit: int) -> Any:
        tenants = [self.names[BOB]] * 60 + [self.names[ALICE]] * 3
        waits = [
            pb.Wait(request_id=f"r{n}", tenant=tenant) for n, tenant in enumerate(tenants[:limit])
        ]
        return pb.ExplainResponse(num_waiting=len(tenants), waits=waits)


def listed(keys: tuple[str, ...], key: str | None, limit: int = 50) -> tuple[list[str], int]:
    """Ids of the waiting requests that the holder of `key` sees, and how many wait in all."""
    gate: Any = Gate()
    app = build_app(core_over(ScriptedBackend()), keys=ApiKeys(keys), gate=gate)

    async def scenario() -> Any:
        transport = httpx.ASGITransport(app)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(f"/v1/penstock/queue?limit={limit}", headers=headers)

    body = asyncio.run(scenario()).json()
    return [each["request_id"] for each in body["waiting"]], body["num_waiting"]


def test_of_several_models_all_queues_are_shown_or_one() -> None:
    first, second = ScriptedBackend(), ScriptedBackend()
    core = core_over(first, further=[moe_runtime(second, "big")])
    gates: Any = {MODEL: Gate(), MOE: Gate()}
    gates[MOE].breaker_state, gates[MOE].num_asked = "open", 4
    app = build_app(core, gates=gates)

    async def scenario() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = ("", f"?model={MODEL}", "?model=big", "?model=x")
            return [await client.get(f"/v1/penstock/queue{each}") for each in asked]

    both, dense, moe, unknown = asyncio.run(scenario())
    waiting = [(each.json()["num_waiting"], each.json()["breaker"]) for each in (both, dense, moe)]
    assert waiting == [(126, "open"), (63, "closed"), (63, "open")]
    assert [each.json()["num_asked"] for each in (both, dense, moe)] == [4, 0, 4]
    assert unknown.status_code == 404


def test_a_caller_sees_its_own_requests_however_many_are_before_them() -> None:
    assert listed((ALICE, BOB), ALICE) == (["r60", "r61", "r62"], 63)
    names, _ = listed((ALICE, BOB), BOB, limit=7)
    assert names == [f"r{n}" for n in range(7)]


def test_without_keys_all_are_shown() -> None:
    names, _ = listed((), None, limit=62)
    assert names == [f"r{n}" for n in range(62)]
