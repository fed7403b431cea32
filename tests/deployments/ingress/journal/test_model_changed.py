"""A stream that is continued stays of one model: workers of other weights do not go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.call import Call, CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.journal.records import kept_from, record_bytes
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import Delta, FinishReason, RequestError, SamplingParams
from penstock.workers.text.tokenizer import Tokenizer
from tests.deployments.ingress.journal.test_resume import COMPLETIONS, stream
from tests.deployments.ingress.test_continuation import Node, core_over
from tests.deployments.serving import ScriptedBackend, Serving, model, tokenizer

CALL_ID = "ab12"
SAME: dict[str, Any] = {"model_digest": "t-1", "weights": "fp32"}
OTHER = {**SAME, "model_digest": "t-2"}
OTHER_FORMAT = {**SAME, "weights": "bf16"}
CALL = Call(
    "The sea was",
    SamplingParams(temperature=1.0, seed=3, ignore_eos=True, max_tokens=30),
    context=CallContext(CALL_ID),
)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer()


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Makes workers, by what they compute."""
    made: list[Node] = []

    def make(**identity: Any) -> Node:
        made.append(Node(model(), **identity))
        return made[-1]

    yield make
    for node in made:
        node.stop()


async def told(core: RequestCore, journals: Journals, num: int | None = None) -> list[int]:
    """The first `num` tokens of the call, begun or continued; None: all of them."""
    try:
        head = await journals.head(CALL_ID, None)
        journal = await journals.resume(CALL_ID, head)
    except RequestError:  # not found
        journal = journals.journal_for(CALL.context, "/v1/completions", b"{}")
        await journals.begin(journal)
    context = replace(CALL.context, is_continued=journal.is_resumed)
    generation = await core.prepare(replace(CALL, context=context))
    journal.delivery([generation])
    ids: list[int] = []
    async with aclosing(core.run(generation, 0, journal)) as pieces:
        async for _, piece in pieces:
            ids += piece.token_ids
            if num is not None and len(ids) >= num:
                break
    while journals._changed:  # a store that is late takes it at a later flush
        await journals.flush()
    return ids


async def attempt(
    store: Any, words: Tokenizer, workers: Sequence[Node], num: int | None = None
) -> tuple[list[int], str]:
    """What an ingress over these workers makes of the call: its tokens, and how it failed."""
    journals = Journals(store, "an ingress")
    try:
        async with core_over(workers, words) as core, asyncio.timeout(60):
            core.runtimes[0].backend._lost_wait_s = 0.3  # type: ignore[attr-defined]
            try:
                return await told(core, journals, num), ""
            except ServiceError as error:
                return [], error.code
    finally:
        journals._writing.cancel()


def test_other_weights_do_not_continue_a_stream(words: Tokenizer, nodes: Any, tmp_path: Path):
    first, other, third = nodes(**SAME), nodes(**OTHER), nodes(**SAME)
    format_only = nodes(**OTHER_FORMAT)

    async def scenario() -> None:
        store = await open_store(StateOptions(state_url=f"sqlite://{tmp_path / 'state'}"))
        begun, _ = await attempt(store, words, [first], 5)
        assert len(begun) >= 5
        # After an update: at once where the files are others, else after the wait for a worker.
        for changed in (other, format_only):
            assert await attempt(store, words, [changed]) == ([], "model_changed")
            assert changed.engine.stats().num_generated_tokens == 0
        # In the midst of one, a worker that fits goes on.
        whole, _ = await attempt(store, words, [other, third])
        assert whole[: len(begun)] == begun and len(whole) == 30
        assert other.engine.stats().num_generated_tokens == 0
        # What has ended needs no worker.
        assert await attempt(store, words, [other]) == (whole, "")
        await store.close()

    asyncio.run(scenario())


def test_records_say_once_what_computed_the_tokens() -> None:
    def made(*ids: int, computes: str = "") -> Delta:
        return Delta("a", list(ids), computes=computes)

    records = [record_bytes([made(1, computes="t-1 fp32"), made(2)]), record_bytes([made(3)])]
    (kept,) = kept_from(records).values()
    assert kept.computes == "t-1 fp32"
    assert [each.token_ids for each in kept.deltas] == [[1, 2], [3]]
    assert kept_from([record_bytes([made(1)])])["a"].computes == ""


class OfOneModel(ScriptedBackend):
    """Workers that all compute so; they refuse what others have begun, as the pool does."""

    def __init__(self, computes: str, *script: Any):
        super().__init__(*script)
        self.computes = computes

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        if admission.computes not in ("", self.computes):
            raise ServiceError("model_changed")
        async for delta in super().generate(admission):
            delta.computes = self.computes
            yield delta


def test_the_client_is_told_to_send_the_request_again(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'state'}"
    body = {"prompt": "It was", "max_tokens": 9}
    old = OfOneModel("t-1 fp32", [5], [6], 30.0)
    with (
        Serving(old, state_url=url) as first,
        httpx.Client(base_url=first.base_url, timeout=60) as http,
    ):
        call_id, _, ids = stream(http, COMPLETIONS, body, 2)
        with grpc.insecure_channel(first.grpc_target) as channel:
            begun = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(text="It was")
            )
            request_id = next(begun).request_id
            next(begun)
            begun.cancel()
    new = OfOneModel("t-2 fp32", [7], FinishReason.STOP)
    with (
        Serving(new, state_url=url) as second,
        httpx.Client(base_url=second.base_url, timeout=60) as http,
        grpc.insecure_channel(second.grpc_target) as channel,
    ):
        path = f"/v1/penstock/streams/{call_id}"
        refused = http.get(path, headers={"Last-Event-ID": ids[-1]})
        assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "model_changed"
        assert "send the request again" in refused.json()["error"]["message"]
        # A client that has nothing yet gets what is kept, and then the error.
        events = http.get(path).text
        assert events.count('"text"') >= 1 and '"code":"model_changed"' in events
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            list(stub.ResumeGenerate(pb.ResumeRequest(request_id=request_id)))
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert dict(error.value.trailing_metadata())["error-code"] == "model_changed"
