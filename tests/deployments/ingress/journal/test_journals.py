"""Journals: who may continue a stream, who speaks for it, and what happens without a store."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.client.http_resume import ResumingTransport
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.call import TextDelta
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal.received import (
    Delivery,
    Received,
    checksum_of,
    parse_event_id,
)
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import Delta, FinishReason, RequestError
from tests.deployments.ingress.journal.test_resume import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    events_of,
    resume,
    stream,
    whole_of,
)
from tests.deployments.serving import EngineBackend, ScriptedBackend, Serving, Step
from tests.deployments.state.servers import RedisServer
from tests.deployments.waiting import eventually

BODY: dict[str, Any] = {"prompt": "It was", "max_tokens": 30, "temperature": 1.0}
KEYS = ["one-of-these-keys", "another-of-these-keys"]


@pytest.fixture(scope="module")
def backend() -> Iterator[EngineBackend]:
    backend = EngineBackend()
    yield backend
    backend.stop()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def two(backend: EngineBackend, redis: RedisServer) -> Iterator[tuple[Serving, Serving]]:
    """Two servers over one store, with keys."""
    url = f"redis://127.0.0.1:{redis.port}/0"
    with (
        Serving(backend, state_url=url, api_keys=KEYS) as first,
        Serving(EngineBackend(), state_url=url, api_keys=KEYS) as second,
    ):
        yield first, second
        second.backend.stop()


def http_of(serving: Serving, key: str | None = KEYS[0]) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=serving.base_url, timeout=60, headers=headers)


def test_another_server_continues_a_stream(two: tuple[Serving, Serving]) -> None:
    with http_of(two[0]) as first, http_of(two[1]) as second:
        call_id, begun, ids = stream(first, COMPLETIONS, BODY, 3)
        rest, _ = resume(second, call_id, ids[-1])
        again, _ = resume(first, call_id, None)
    assert whole_of(begun + rest) == whole_of(again)


def test_only_its_caller_continues_a_stream(two: tuple[Serving, Serving]) -> None:
    with http_of(two[0]) as own, http_of(two[1], KEYS[1]) as other:
        call_id, _, ids = stream(own, COMPLETIONS, BODY, 3)
        path = f"/v1/penstock/streams/{call_id}"
        refused = other.get(path)
        unknown = other.get(f"/v1/penstock/streams/{'0' * 24}")
        assert refused.status_code == unknown.status_code == 404
        hidden = refused.json()["error"]["message"].replace(call_id, "0" * 24)
        assert hidden == unknown.json()["error"]["message"]
        assert own.get(path).status_code == 200
    with Client(two[1].grpc_target, api_key=KEYS[1]) as client, pytest.raises(grpc.RpcError) as e:
        list(
            client._stub.ResumeGenerate(
                pb.ResumeRequest(request_id=call_id),
                metadata=[("authorization", f"Bearer {KEYS[1]}")],
            )
        )
    assert e.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        (lambda each: each[:-1] + ("0" if each[-1] != "0" else "1"), 409),  # other tokens
        (lambda each: each.replace("/", "/9", 1), 409),  # more tokens than there are
        (lambda each: each.replace("/", "", 1), 400),
        (lambda each: "ab/" + each.partition("/")[2], 400),  # of another stream
        (lambda each: each + "-1.00000000", 400),  # of more answers
        (lambda each: "x" * 5000, 400),
    ],
)
def test_positions_that_are_not_of_the_stream_are_refused(
    two: tuple[Serving, Serving], changed: Any, status: int
) -> None:
    with http_of(two[0]) as http:
        call_id, _, ids = stream(http, COMPLETIONS, BODY, 3)
        headers = {"Last-Event-ID": changed(ids[-1])}
        answer = http.get(f"/v1/penstock/streams/{call_id}", headers=headers)
        if answer.status_code == 200:  # found when the stream had begun
            error = json.loads(answer.text.split("data: ")[1])["error"]
            assert status == 409 and error["code"] == "resume_mismatch"
        else:
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
            assert status == 400 or answer.headers["x-should-retry"] == "false"


def test_a_connection_that_continues_a_stream_ends_the_earlier_one(
    redis: RedisServer,
) -> None:
    url = f"redis://127.0.0.1:{redis.port}/0"
    script: list[Step] = [[5], 0.3] * 200
    ends: list[Any] = []
    with Serving(ScriptedBackend(*script), state_url=url) as serving, http_of(serving) as http:
        started = threading.Event()
        call_ids: list[str] = []

        def first() -> None:
            with http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response:
                call_ids.append(response.headers["x-request-id"])
                for line in response.iter_lines():
                    started.set()
                    if line.startswith("data: "):
                        ends.append(json.loads(line[6:]))

        thread = threading.Thread(target=first)
        thread.start()
        assert started.wait(60)
        with http.stream("GET", f"/v1/penstock/streams/{call_ids[0]}") as response:
            assert response.status_code == 200
            bodies, _ = events_of(response.iter_lines(), 2)
            thread.join(60)
            assert not thread.is_alive()
            assert ends[-1]["error"]["code"] == "resumed_elsewhere"
            assert bodies[-1]["choices"][0]["text"] is not None


def test_without_an_answer_of_the_store_streams_go_on_and_promises_are_refused(
    backend: EngineBackend, tmp_path: Path
) -> None:
    redis = RedisServer(tmp_path).start()
    url = f"redis://127.0.0.1:{redis.port}/0"
    with Serving(backend, state_url=url) as serving, http_of(serving, None) as http:
        assert _grpc_says_resumable(serving)
        with http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response:
            call_id, lines = response.headers["x-request-id"], response.iter_lines()
            events_of(lines, 2)
            redis.kill()
            bodies, _ = events_of(lines)
            assert bodies[-1] == "[DONE]"
        with http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response:
            assert response.headers["x-penstock-resumable"] == "0"
            bodies, ids = events_of(response.iter_lines())
            assert bodies[-1] == "[DONE]" and not any(ids)
        assert not _grpc_says_resumable(serving)
        assert http.post(COMPLETIONS, json=BODY).status_code == 200
        for answer in (
            http.get(f"/v1/penstock/streams/{call_id}"),
            http.post(COMPLETIONS, json=BODY, headers={"Idempotency-Key": "k"}),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "state_unavailable"
            assert answer.headers["retry-after"] == "2"
        redis.start()

        def is_resumable() -> bool:
            with http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response:
                return bool(response.headers["x-penstock-resumable"] == "1")

        eventually(is_resumable)
    redis.kill()


def _grpc_says_resumable(serving: Serving) -> bool:
    """Of a stream that begins now."""
    with grpc.insecure_channel(serving.grpc_target) as channel:
        sampling = pb.SamplingParams(max_tokens=2, ignore_eos=True)
        request = pb.GenerateRequest(text="a", sampling=sampling)
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        metadata = dict(stream.initial_metadata())
        answers = list(stream)
        assert answers[0].request_id == metadata["x-request-id"]
        return metadata.get("x-penstock-resumable") == "1"


def test_the_same_key_gives_the_same_answer(two: tuple[Serving, Serving]) -> None:
    headers = {"Idempotency-Key": "order-1"}
    with http_of(two[0]) as first, http_of(two[1]) as second:
        for path, body in ((COMPLETIONS, BODY), (CHAT, {"messages": MESSAGES, "max_tokens": 9})):
            answers = [
                each.post(path, json=body, headers=headers) for each in (first, second, first)
            ]
            assert {answer.status_code for answer in answers} == {200}
            texts = [answer.json() for answer in answers]
            assert texts[0] == texts[1] == texts[2]
            replayed = [answer.headers.get("idempotent-replayed") for answer in answers]
            assert replayed == [None, "true", "true"]
            # in another order of fields it is the same request
            turned = dict(reversed(body.items()))
            assert second.post(path, json=turned, headers=headers).json() == texts[0]
            other = second.post(path, json={**body, "max_tokens": 8}, headers=headers)
            assert other.status_code == 422
            assert other.json()["error"]["code"] == "idempotency_key_reused"
        with http_of(two[0], KEYS[1]) as stranger:  # a key belongs to its caller
            assert (
                "idempotent-replayed"
                not in stranger.post(COMPLETIONS, json=BODY, headers=headers).headers
            )


def test_two_requests_with_one_key_at_the_same_time_give_one_answer(
    two: tuple[Serving, Serving],
) -> None:
    headers = {"Idempotency-Key": "order-2"}
    answers: list[httpx.Response] = []

    def post(serving: Serving) -> None:
        with http_of(serving) as http:
            answers.append(http.post(COMPLETIONS, json=BODY, headers=headers))

    threads = [threading.Thread(target=post, args=(two[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    good = [answer.json() for answer in answers if answer.status_code == 200]
    others = {a.json()["error"]["code"] for a in answers if a.status_code != 200}
    assert good and all(each == good[0] for each in good)
    assert others <= {"resumed_elsewhere"}


def test_a_key_of_a_request_that_was_refused_may_be_used_again(redis: RedisServer) -> None:
    url = f"redis://127.0.0.1:{redis.port}/0"
    headers = {"Idempotency-Key": "order-3"}
    backend = ScriptedBackend("no_worker")
    with Serving(backend, state_url=url) as serving, http_of(serving, None) as http:
        bad = http.post(COMPLETIONS, json={**BODY, "max_tokens": -1}, headers=headers)
        assert bad.status_code == 400
        assert http.post(COMPLETIONS, json=BODY, headers=headers).status_code == 503
        backend.script = ([5], FinishReason.LENGTH)
        answer = http.post(COMPLETIONS, json={**BODY, "max_tokens": 5}, headers=headers)
        assert answer.status_code == 200 and "idempotent-replayed" not in answer.headers
        for key in ("", "x" * 256):
            refused = http.post(COMPLETIONS, json=BODY, headers={"Idempotency-Key": key})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "Idempotency-Key"


def test_a_grpc_stream_is_continued_by_its_own_method_only(two: tuple[Serving, Serving]) -> None:
    with http_of(two[0]) as http, Client(two[0].grpc_target, api_key=KEYS[0]) as client:
        call_id, _, _ = stream(http, COMPLETIONS, BODY, 2)
        first = next(iter(client.generate("It was", max_tokens=20)))
        answer = http.get(f"/v1/penstock/streams/{first.request_id}")
        assert answer.status_code == 400 and "Generate" in answer.json()["error"]["message"]
        with pytest.raises(ClientError) as error:
            list(
                client._stream(client._stub.ResumeChat, None, pb.ResumeRequest(request_id=call_id))
            )
        assert error.value.code == "invalid_value" and COMPLETIONS in error.value.message


def test_usage_comes_whichever_answers_of_a_grpc_call_had_ended(
    two: tuple[Serving, Serving],
) -> None:
    """Replayed, answers end in another order: the one that ends last may be one that is known."""
    with Client(two[0].grpc_target, api_key=KEYS[0]) as client:
        whole = list(client.generate("It was", n=3, max_tokens=9, ignore_eos=True))
        call_id, usage = whole[0].request_id, whole[-1].usage
        assert usage is not None and usage.completion_tokens == 27
        ids = {each: [] for each in range(3)}  # type: dict[int, list[int]]
        for part in whole:
            ids[part.choice] += part.token_ids
        for ended in ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            received = [
                pb.ReceivedTokens(num_tokens=9 * (i in ended), has_ended=i in ended)
                for i in range(3)
            ]
            asked = pb.ResumeRequest(request_id=call_id, received=received)
            rest = list(client._stream(client._stub.ResumeGenerate, None, asked))
            assert [each.usage for each in rest if each.usage is not None] == [usage], ended
            assert rest[-1].usage == usage
            for i in range(3):
                got = [token for part in rest if part.choice == i for token in part.token_ids]
                assert got == ([] if i in ended else ids[i])


def piece(*token_ids: int, ends: bool = False) -> TextDelta:
    return TextDelta("", list(token_ids), FinishReason.STOP if ends else None)


def test_event_ids_name_what_was_received() -> None:
    delivery = Delivery("ab", 2)
    assert delivery.is_new(0, piece(1, 2)) and delivery.is_new(1, piece(3, ends=True))
    call_id, received, _ = parse_event_id(delivery.event_id())
    assert call_id == "ab"
    assert received == (
        Received(2, False, checksum_of([1, 2])),
        Received(1, True, checksum_of([3])),
    )
    again = Delivery("ab", 2, received)
    assert not again.is_new(0, piece(1)) and not again.is_new(0, piece(2))
    assert again.is_new(0, piece()) and again.is_new(0, piece(4))
    assert not again.is_new(1, piece(3)) and not again.is_new(1, piece(ends=True))
    assert again.has_begun(0) and not Delivery("ab", 1).has_begun(0)


@pytest.mark.parametrize("pieces", [[piece(1, 5)], [piece(1), piece(7)], [piece(1, ends=True)]])
def test_other_tokens_than_the_client_has_are_an_error(pieces: list[TextDelta]) -> None:
    delivery = Delivery("ab", 1, (Received(2, False, checksum_of([1, 2])),))
    with pytest.raises(ServiceError) as error:
        list(map(partial(delivery.is_new, 0), pieces))
    assert error.value.code == "resume_mismatch"
    with pytest.raises(RequestError):
        Delivery("ab", 1, (Received(), Received()))


class LosesItsWorker(ScriptedBackend):
    """The first attempt ends as where an ingress drains, or finds no worker in time."""

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        is_first = not self.requests
        self.script = ([5], [6], 0.1, "worker_lost") if is_first else ([7], FinishReason.LENGTH)
        async with aclosing(super().generate(admission)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta


@pytest.mark.parametrize("is_http", [False, True])
def test_clients_continue_what_a_server_had_to_end(redis: RedisServer, is_http: bool) -> None:
    url = f"redis://127.0.0.1:{redis.port}/0"
    backend = LosesItsWorker()
    with Serving(backend, state_url=url) as serving:
        if is_http:
            http_client = openai.DefaultHttpxClient(transport=ResumingTransport())
            with openai.OpenAI(
                base_url=f"{serving.base_url}/v1", api_key="none", http_client=http_client
            ) as client:
                chunks = client.completions.create(
                    model="builtin", prompt="It was", stream=True, max_tokens=9
                )
                last = list(chunks)[-1]
            assert last.choices[0].finish_reason == "length"
        else:
            with Client(serving.grpc_target) as own:
                assert own.complete("It was", max_tokens=9).token_ids == (5, 6, 7)
    first, second = backend.requests
    assert first.emitted_ids == () and second.emitted_ids == (5, 6)
    assert second.params.seed == first.params.seed is not None
    assert second.request_id != first.request_id
