"""What the pool notes of an answer: its waits for admission, its workers, and their loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from penstock.deployments.ingress.core.call import Call, CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.request import SamplingParams
from tests.deployments.gate.test_with_workers import Node
from tests.deployments.ingress import test_continuation as continuation
from tests.deployments.ingress.dispatch.peers.scripted_gate import ScriptedGate
from tests.deployments.ingress.test_longest_wait import ONE_SLOT, connected, core_over
from tests.deployments.ingress.tracing.spans import PHASES, Kept, about, below, check_order, one
from tests.deployments.serving import generated
from tests.deployments.serving import tokenizer as the_tokenizer
from tests.deployments.waiting import until


def traced_call(kept: Kept, max_tokens: int = 8) -> Call:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    trace = kept.tracer.begin("request", {}, None, None)
    return Call("The sea was", params, context=CallContext(trace=trace))


async def ids_of(core: RequestCore, call: Call) -> list[int]:
    ids: list[int] = []
    try:
        async for piece in generated(core, call):
            ids += piece.token_ids
    finally:
        assert call.context.trace is not None
        call.context.trace.end()
    return ids


def answer_in(kept: Kept) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of the only answer, and what is below it."""
    spans = kept.take()
    (answer,) = below(spans, one(spans, "request"))
    return answer, below(spans, answer)


def events_of(span: ReadableSpan) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, dict(event.attributes or {})) for event in span.events]


@pytest.fixture
def node(model):
    made = Node(model, ONE_SLOT)
    yield made
    made.stop()


def test_the_wait_at_the_gate_and_the_phases_at_the_worker(run, node):
    gate, kept, moments = ScriptedGate(), Kept(), list[int]()

    async def scenario() -> list[int]:
        async with connected(node, gate) as pool:
            core = core_over(pool, node, wait_s=60.0, learner=pool._gate)
            running = asyncio.ensure_future(ids_of(core, traced_call(kept)))
            await until(lambda: gate.offered)
            moments.append(time.time_ns())  # it waits now
            await gate.admit(gate.offered, node.channel.info.epoch)
            return await running

    assert len(run(scenario())) == 8
    answer, phases = answer_in(kept)
    assert [phase.name for phase in phases] == PHASES
    check_order(answer, phases)
    waited = phases[0]
    assert waited.start_time is not None and waited.end_time is not None
    assert waited.start_time < moments[0] < waited.end_time
    assert about(waited) == {"penstock.wait.reason": "new"}
    worker = node.channel.info.address
    assert events_of(answer) == [("penstock.sent", {"penstock.worker": worker})]
    assert about(answer)["penstock.worker"] == worker
    assert answer.events[0].timestamp == waited.end_time == phases[1].start_time


def test_a_request_that_the_gate_never_admits(run, node):
    gate, kept = ScriptedGate(), Kept()

    async def scenario() -> None:
        async with connected(node, gate) as pool:
            core = core_over(pool, node, wait_s=0.2, learner=pool._gate)
            await ids_of(core, traced_call(kept))

    with pytest.raises(ServiceError):
        run(scenario())
    answer, (waited,) = answer_in(kept)
    assert waited.name == "gate wait" and waited.end_time == answer.end_time
    assert events_of(answer) == [] and "penstock.worker" not in about(answer)
    assert about(answer)["penstock.finish"] == about(answer)["error.type"] == "deadline_exceeded"
    assert answer.status.status_code is StatusCode.ERROR


def continued(model: Any, kept: Kept, ends: Sequence[int | None]) -> tuple[list[int], list[str]]:
    """The ids of an answer whose workers end after so many tokens, and the workers' addresses."""
    nodes = [continuation.Node(model, each) for each in ends]

    async def scenario() -> list[int]:
        async with continuation.core_over(nodes, the_tokenizer()) as core, asyncio.timeout(60):
            return await ids_of(core, traced_call(kept, 40))

    try:
        return asyncio.run(scenario()), [node.channel.info.address for node in nodes]
    finally:
        for node in nodes:
            node.stop()


def test_a_stream_that_continues_after_its_worker(model):
    kept = Kept()
    expected, _ = continued(model, kept, [None])
    kept.take()
    ids, (first, second) = continued(model, kept, [7, None])
    assert ids == expected and len(ids) == 40
    answer, phases = answer_in(kept)
    *events, (last, about_last) = events_of(answer)
    assert events == [
        ("penstock.sent", {"penstock.worker": first}),
        ("penstock.worker_lost", {"penstock.worker": first, "penstock.emitted_tokens": 7}),
        ("penstock.sent", {"penstock.worker": second}),
    ]
    assert (last, about_last["penstock.worker"]) == ("penstock.continued", second)
    assert 8 <= about_last["penstock.emitted_tokens"] <= 40  # of those, some may not be read yet
    waits = [phase for phase in phases if phase.name == "gate wait"]
    assert [about(wait)["penstock.wait.reason"] for wait in waits] == ["new", "lost"]
    assert waits[1].end_time == answer.events[2].timestamp
    decode = one(phases, "decode")
    assert decode.start_time is not None and decode.end_time is not None
    assert decode.start_time <= answer.events[1].timestamp < answer.events[3].timestamp
    assert answer.events[3].timestamp <= decode.end_time
    assert {phase.name for phase in phases} == set(PHASES)  # those of the first worker
    assert answer.status.status_code is StatusCode.UNSET
    assert about(answer)["gen_ai.usage.output_tokens"] == 40


def test_a_worker_that_is_lost_before_the_first_token_counts_as_a_wait(model):
    """Queue and prefill are those of the worker that made the first token."""
    kept = Kept()
    node, dying = continuation.Node(model), continuation.Node(model, 0)
    assert dying._left == 0  # it answers nothing

    async def scenario() -> list[int]:
        async with continuation.core_over([dying, node], the_tokenizer()) as core:
            running = asyncio.ensure_future(ids_of(core, traced_call(kept)))
            await until(lambda: dying.engine.stats().num_generated_tokens)
            dying.channel.break_off()
            async with asyncio.timeout(60):
                return await running

    try:
        assert len(asyncio.run(scenario())) == 8
    finally:
        dying.stop()
        node.stop()
    answer, phases = answer_in(kept)
    sent = [event.timestamp for event in answer.events if event.name == "penstock.sent"]
    assert len(sent) == 2
    assert one(phases, "worker queue").start_time == sent[1]
    assert [phase.name for phase in phases] == ["gate wait", *PHASES]
    check_order(answer, phases)


@pytest.mark.parametrize("ratio", [None, 0.0])
def test_without_a_sampled_trace_the_history_is_kept_and_nothing_is_sent(run, node, ratio):
    """For `penstock explain`. `ratio` None: there is no trace at all."""
    kept = Kept(ratio or 0.0)

    async def scenario() -> list[int]:
        pool: WorkerPool
        async with connected(node) as pool:
            core = core_over(pool, node, wait_s=60.0)
            call = traced_call(kept)
            if ratio is None:
                call = replace(call, context=CallContext())
            (generation,) = await core.prepare_choices(call, 1)
            ids: list[int] = []
            async for _, piece in core.run(generation):
                ids += piece.token_ids
            trace = generation.admission.trace
            assert trace is not None and [each.name for each in trace.events] == ["penstock.sent"]
            return ids

    assert len(run(scenario())) == 8
    assert not kept.take()
