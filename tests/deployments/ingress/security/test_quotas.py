"""Quotas and priorities of keys as clients meet them: refusals, headers, and what goes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2, status_pb2

from penstock.deployments.client import Client, ClientError
from penstock.deployments.ingress.core.billing import Billing
from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.quotas import MemoryBuckets, QuotaLimiter
from penstock.deployments.security.records import QuotaLimits
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import ScriptedBackend, Serving
from tests.deployments.waiting import eventually, until

PROMPT = list(range(5, 15))
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


REMAINING = b"x-ratelimit-remaining-tokens"


class Slow(MemoryBuckets):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer, self.num_waiting = asyncio.Event(), 0

    async def take(self, buckets: Any, *, budget_s: float = 0.0) -> Any:
        self.num_waiting += 1
        await self.may_answer.wait()
        return await super().take(buckets)


def serving_of(*records: Any, script: Any = ([5, 6], [7], FinishReason.STOP)) -> Serving:
    return Serving(ScriptedBackend(*script), api_keys=records)


def post(serving: Serving, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    values: dict[str, Any] = {"max_tokens": 20, **body}
    if path != CHAT:
        values.setdefault("prompt", PROMPT)
    return httpx.post(serving.base_url + path, json=values, headers=bearer(key), timeout=30)


def quota_headers(answer: httpx.Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {
        name.removeprefix(prefix): value
        for name, value in answer.headers.items()
        if name.startswith(prefix)
    }


def remaining(serving: Serving, tenant: str = "acme") -> dict[str, str]:
    """What the next answer of the tenant would say."""
    billing = serving.core.billing
    assert billing is not None
    headers = serving.call(lambda: billing.headers(tenant))
    return {name.decode(): value.decode() for name, value in headers}


def test_requests_beyond_the_quota_are_refused_with_a_code_of_their_own() -> None:
    quotas = QuotaLimits(requests_per_day=3, tokens_per_day=5000)
    (key, record), (second, other) = key_of(quotas=quotas), key_of(quotas=quotas)
    (free, free_record) = key_of("free")
    with serving_of(record, other, free_record) as serving:
        for n in range(3):
            answer = post(serving, (key, second)[n % 2], stream=n == 1)  # of one tenant
            assert answer.status_code == 200
            headers = quota_headers(answer)
            assert headers["limit-requests"] == "3" and headers["limit-tokens"] == "5000"
            assert headers["remaining-requests"] == str(2 - n)
            assert headers["reset-requests"].endswith("s")
            assert int(headers["remaining-tokens"]) <= 5000 - 13 * (n + 1)
        answer = post(serving, key)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "3 requests a day" in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 86400
        assert quota_headers(answer)["remaining-requests"] == "0"
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ):
            url = serving.base_url + path
            body = {**body, "model": "builtin"}
            answer = httpx.post(url, json=body, headers=bearer(key), timeout=30)
            assert answer.status_code == 429 and quota_headers(answer)["remaining-requests"] == "0"
        answer = post(serving, free)
        assert answer.status_code == 200 and not quota_headers(answer)
        listed = httpx.get(f"{serving.base_url}/v1/models", headers=bearer(key), timeout=30)
        assert listed.status_code == 200 and not quota_headers(listed)
        with (
            openai.OpenAI(
                base_url=f"{serving.base_url}/v1", api_key=key, max_retries=0
            ) as official,
            pytest.raises(openai.RateLimitError),
        ):
            official.completions.create(model="builtin", prompt="a")


def test_over_grpc_the_refusal_has_retry_info() -> None:
    key, record = key_of(quotas=QuotaLimits(requests_per_day=1))
    with serving_of(record) as serving, grpc.insecure_channel(serving.grpc_target) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {key}"),)
        request = pb.GenerateRequest(text="a")
        assert list(stub.Generate(request, metadata=metadata))
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, metadata=metadata))
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(error.trailing_metadata())
        assert trailing["error-code"] == "rate_limit_exceeded"
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        info = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info) and info.retry_delay.seconds >= 0


def test_what_was_reserved_and_not_used_goes_back() -> None:
    key, record = key_of(quotas=QuotaLimits(tokens_per_day=1000))
    with serving_of(record) as serving:
        answer = post(serving, key, max_tokens=400)  # 10 tokens of prompt, 3 of answer
        assert answer.status_code == 200
        eventually(lambda: remaining(serving)["x-ratelimit-remaining-tokens"] == "987")
        answer = post(serving, key, max_tokens=400, n=2)  # the prompt counts once
        assert answer.json()["usage"]["total_tokens"] == 16
        eventually(lambda: remaining(serving)["x-ratelimit-remaining-tokens"] == "971")
        answer = post(serving, key, max_tokens=490, n=2)
        assert (
            answer.status_code == 429 and "1000 tokens a day" in answer.json()["error"]["message"]
        )
        eventually(lambda: remaining(serving)["x-ratelimit-remaining-tokens"] == "971")
        answer = post(serving, key, max_tokens=500, n=2)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("quota_too_small", "max_tokens")
        assert "may take 1010 tokens" in error["message"]


def test_an_answer_without_max_tokens_is_not_refused_for_its_guessed_length() -> None:
    key, record = key_of(quotas=QuotaLimits(tokens_per_minute=100))
    with serving_of(record) as serving:
        assert post(serving, key, max_tokens=None, path=CHAT, **HELLO).status_code == 200
        answer = post(serving, key, max_tokens=None, n=2, path=CHAT, **HELLO)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) <= 60
        answer = post(serving, key, prompt=PROMPT * 11, max_tokens=None)  # no guess: 110 tokens
        assert answer.json()["error"]["code"] == "quota_too_small"


def test_a_request_that_is_too_large_is_told_the_field_as_its_api_names_it() -> None:
    key, record = key_of(quotas=QuotaLimits(tokens_per_minute=100))
    with serving_of(record) as serving:
        for path, name, given in (
            (CHAT, "max_completion_tokens", HELLO),
            (CHAT, "max_tokens", HELLO),
            ("/v1/responses", "max_output_tokens", {"input": "a"}),
            ("/v1/responses", "max_output_tokens", {"input": "a", "stream": True}),
            ("/v1/messages", "max_tokens", HELLO),
        ):
            values = {"model": "builtin", **given, name: 200}
            url = serving.base_url + path
            answer = httpx.post(url, json=values, headers=bearer(key), timeout=30)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert f"lower {name}," in error["message"]
            assert path == "/v1/messages" or error["param"] == name


def test_a_request_that_no_worker_computed_costs_no_tokens() -> None:
    key, record = key_of(quotas=QuotaLimits(tokens_per_day=1000))
    with serving_of(record, script=("no_worker",)) as serving:
        assert post(serving, key, max_tokens=400).status_code == 503
        eventually(lambda: remaining(serving)["x-ratelimit-remaining-tokens"] == "1000")


def test_a_client_that_leaves_pays_for_what_it_had() -> None:
    key, record = key_of(quotas=QuotaLimits(tokens_per_day=1000))
    with (
        serving_of(record, script=([5, 6], 60.0)) as serving,
        httpx.stream(
            "POST",
            f"{serving.base_url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 400, "stream": True},
            headers=bearer(key),
            timeout=30,
        ) as answer,
    ):
        next(answer.iter_bytes())
        answer.close()
        eventually(lambda: remaining(serving)["x-ratelimit-remaining-tokens"] == "988")


def test_a_stream_that_is_continued_is_paid_once(tmp_path: Path) -> None:
    key, record = key_of(quotas=QuotaLimits(requests_per_day=5, tokens_per_day=1000))
    backend = ScriptedBackend([5, 6], [7], FinishReason.STOP)
    with Serving(backend, api_keys=[record], state_url=f"sqlite://{tmp_path}/state") as serving:
        answer = post(serving, key, stream=True)
        url = f"{serving.base_url}/v1/penstock/streams/{answer.headers['x-request-id']}"
        eventually(lambda: remaining(serving)["x-ratelimit-remaining-tokens"] == "987")
        again = httpx.get(url, headers=bearer(key), timeout=30)
        assert again.status_code == 200 and again.text.endswith("data: [DONE]\n\n")
        headers = remaining(serving)
        assert headers["x-ratelimit-remaining-tokens"] == "987"
        assert headers["x-ratelimit-remaining-requests"] == "4"


def test_a_call_whose_client_leaves_while_it_reserves_gives_all_back(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        _, record = key_of(quotas=QuotaLimits(tokens_per_day=1000))
        shared = Slow()
        billing = Billing(ApiKeys([record]), QuotaLimiter(shared))
        bill = billing.bill("acme", 10, 600, 1)
        assert bill is not None
        task = asyncio.ensure_future(bill.begin())
        await until(lambda: shared.num_waiting)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        shared.may_answer.set()
        await until(lambda: dict(billing.headers("acme"))[REMAINING] == b"1000")

    run(scenario())


def test_the_log_names_tenant_and_key(caplog: pytest.LogCaptureFixture) -> None:
    key, record = key_of()
    caplog.set_level("INFO", "penstock.requests")
    with serving_of(record) as serving:
        assert post(serving, key).status_code == 200
    line = json.loads(caplog.messages[-1])
    assert (line["tenant"], line["key"]) == ("acme", record.key_id)
    assert key.split("_")[2] not in caplog.text


def test_priority_above_the_keys_is_refused_and_names_the_field() -> None:
    key, record = key_of(max_priority=20)
    with serving_of(record) as serving:
        backend: ScriptedBackend = serving.backend
        for priority, status in ((None, 200), (20, 200), (100, 200), (19, 403), (0, 403)):
            given: dict[str, Any] = {} if priority is None else {"priority": priority}
            answer = post(serving, key, **given)
            assert answer.status_code == status, priority
        assert answer.json()["error"]["param"] == "priority"
        assert answer.json()["error"]["code"] == "permission_denied"
        assert [each.priority for each in backend.requests] == [20, 20, 100]
        with Client(serving.grpc_target, api_key=key) as client:
            with pytest.raises(ClientError) as refused:
                list(client.generate("a", priority=5))
            assert (refused.value.code, refused.value.param) == ("permission_denied", "priority")
            list(client.generate("a"))
        assert backend.requests[-1].priority == 20


def test_the_weight_of_a_tenant_goes_with_its_requests_and_with_its_batches() -> None:
    _, record = key_of(weight=2.5)
    with serving_of(record) as serving:
        core = serving.core

        def weight(principal: str) -> float:
            call = Call((5, 6), options=CallOptions(), context=CallContext(principal=principal))
            return serving.wait(core.prepare(call)).admission.weight

        assert [weight(name) for name in ("acme", "batch:acme", "other", "")] == [2.5, 2.5, 1, 1]
