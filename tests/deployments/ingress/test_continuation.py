"""A stream survives its worker: the client gets what it would have got, in every feature.

Real engines behind real channels, in this process; workers end after a number of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from penstock.deployments.ingress.core.call import Call, CallOptions, ChatPrompt, TextDelta
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.tools import Tool, Toolset
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.channel import server
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings
from penstock.workers.engine import thread
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import thread_for
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, FinishReason, SamplingParams
from penstock.workers.structured_spec import StructuredKind, StructuredSpec
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.deployments.waiting import until

CONFIG = EngineConfig(weights="fp32", device="cpu", num_blocks=400, max_num_seqs=16, threads=1)
SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":30},'
    '"age":{"type":"integer"}},"required":["name","age"],"additionalProperties":false}'
)
LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "integer"}}})


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_model("builtin", weights="fp32", progress=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("builtin"))


class Node:
    """A worker that ends after it has sent `ends_after` tokens; None: it stays."""

    def __init__(self, model: Any, ends_after: int | None = None, **identity: Any):
        """`identity`: as for ChannelServer."""
        self.engine = Engine(CONFIG, model)
        self.channel = ChannelServer("127.0.0.1", "builtin", self.engine.max_model_len, **identity)
        self._left = ends_after
        self.thread = thread_for(
            self.engine, self._deliver, self.channel.break_off, self.channel.accepted
        )
        self.thread.start()
        self.channel.start(self.thread)

    def _deliver(self, deltas: list[Delta]) -> None:
        if self._left == 0:  # dead: nothing leaves it any more
            return
        self.channel.deliver(deltas)
        if self._left is not None:
            self._left = max(0, self._left - sum(len(delta.token_ids) for delta in deltas))
            if not self._left:
                self.channel.break_off()

    def stop(self) -> None:
        self.channel.stop()
        self.thread.stop()


@dataclass
class Answers:
    """All that a client got of one call, by choice."""

    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    tool_calls: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def add(self, index: int, piece: TextDelta) -> None:
        self.text[index] = self.text.get(index, "") + piece.text
        self.ids.setdefault(index, []).extend(piece.token_ids)
        # Which tokens, and their ranks: prefill may round a logprob's last bits otherwise.
        self.logprobs.setdefault(index, []).extend(
            (e.token_id, e.rank, e.text_offset) for e in piece.logprobs
        )
        self.prompt_logprobs += piece.prompt_logprobs or []
        for made in piece.tool_calls:
            self.tool_calls[index] = self.tool_calls.get(index, "") + (made.name or "")
            self.tool_calls[index] += made.arguments
        if piece.finish_reason is not None:
            self.ends[index] = (piece.finish_reason, piece.stop_reason, piece.usage)


async def answers(core: RequestCore, call: Call, num_choices: int) -> Answers:
    got = Answers()
    async for index, piece in core.run_many(await core.prepare_choices(call, num_choices)):
        got.add(index, piece)
    return got


@contextlib.asynccontextmanager
async def core_over(nodes: Sequence[Node], tokenizer: Tokenizer) -> AsyncIterator[RequestCore]:
    pool = WorkerPool("test", lost_wait_s=60.0)
    infos = [node.channel.info for node in nodes]
    async with asyncio.timeout(60):
        for number in range(1, len(nodes) + 1):  # idle workers are chosen in this order
            pool.update(infos[:number])
            while pool.num_connected < number:
                await asyncio.sleep(0.005)
    yield RequestCore(
        ModelRuntime(
            tokenizer,
            pool,
            model_name="builtin",
            vocab_size=nodes[0].engine.model.config.vocab_size,
            max_model_len=nodes[0].engine.max_model_len,
            contexts=ContextSettings.of(CONFIG, nodes[0].engine.max_model_len),
        )
    )
    await pool.close()


def outcome(
    model: Any, tokenizer: Tokenizer, call: Call, num_choices: int, ends: Sequence[int | None]
) -> tuple[Answers, int]:
    """The answers by workers that end after so many tokens, and how often a request continued."""
    nodes = [Node(model, each) for each in ends]

    async def scenario() -> tuple[Answers, int]:
        async with core_over(nodes, tokenizer) as core, asyncio.timeout(60):
            got = await answers(core, call, num_choices)
            return got, core.named(None).backend.lost_requests.num_continued  # type: ignore[attr-defined]

    try:
        return asyncio.run(scenario())
    finally:
        for node in nodes:
            node.stop()


def made(prompt: Any = "The sea was", options: CallOptions | None = None, **params: Any) -> Call:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40, **params}
    return Call(prompt, SamplingParams(**sampling), options or CallOptions())


CHAT = ChatPrompt(({"role": "user", "content": "What do you see?"},), tools=Toolset((LOOK,)))
JSON = StructuredSpec(StructuredKind.JSON_SCHEMA, SCHEMA, param="response_format")
CASES: dict[str, tuple[Call, int]] = {
    "greedy": (made(), 1),
    "seeded": (made(temperature=1.0, seed=5, top_p=0.9), 1),
    "unseeded": (made(temperature=1.0), 1),
    "n": (made(temperature=1.0), 3),
    "penalties": (made(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3), 1),
    "bias and bad words": (
        made(
            options=CallOptions(bad_words=("the sea", "and")),
            temperature=0.7,
            logit_bias=((9, 2.0),),
        ),
        1,
    ),
    "stop string": (made(stop=("e w",), max_tokens=200), 1),
    "stop string and min_tokens": (made(stop=("e",), min_tokens=25, max_tokens=200), 1),
    "logprobs": (made(logprobs=3, prompt_logprobs=2), 1),
    "echo": (made(options=CallOptions(echo=True), logprobs=1), 1),
    "json_schema": (made(structured=JSON, ignore_eos=False, temperature=1.0, max_tokens=120), 1),
    "tools": (made(CHAT, ignore_eos=False, temperature=1.0, max_tokens=80), 1),
    "sink_window": (
        made(context_policy="sink_window", sinks=4, window=48, roll=16, max_tokens=250),
        1,
    ),
    "end of text": (made(ignore_eos=False, temperature=0.8, max_tokens=400), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_client_gets_is_what_it_would_have_got(model, tokenizer, case):
    call, num_choices = CASES[case]
    expected, _ = outcome(model, tokenizer, call, num_choices, [None])
    length = max(len(ids) for ids in expected.ids.values())
    for ends in ([1, None], [7, 1, None], [max(length - 2, 2), None]):
        got, num_continued = outcome(model, tokenizer, call, num_choices, ends)
        assert num_continued >= 1, "no worker was lost"
        assert got == expected, ends


def test_a_request_of_which_nothing_is_left_to_say_is_not_continued(model, tokenizer):
    call = made(max_tokens=9)
    expected, _ = outcome(model, tokenizer, call, 1, [None])
    got, num_continued = outcome(model, tokenizer, call, 1, [9, None])
    assert got == expected and num_continued == 0


def test_without_another_worker_the_request_waits_and_then_ends(model, tokenizer):
    node = Node(model, 5)

    async def scenario() -> tuple[list[int], str]:
        async with core_over([node], tokenizer) as core:
            core.named(None).backend._lost_wait_s = 0.5  # type: ignore[attr-defined]
            ids: list[int] = []
            try:
                async for piece in core.run(await core.prepare(made(max_tokens=1500))):
                    ids += piece[1].token_ids
            except ServiceError as error:
                return ids, error.code
        raise AssertionError("it ended")

    ids, code = asyncio.run(scenario())
    node.stop()
    assert code == "worker_lost" and len(ids) >= 5


OTHERS = ({"model_digest": "t-2"}, {"weights": "bf16"}, {"numerics": "kv=int8"})


@pytest.mark.parametrize("other", OTHERS)
def test_an_answer_is_continued_by_the_same_weights_only(model, tokenizer, other):
    """As in an update: the worker that is free is one of other weights."""
    same: dict[str, Any] = {"model_digest": "t-1", "weights": "fp32"}
    call = made()
    expected, _ = outcome(model, tokenizer, call, 1, [None])
    nodes = [Node(model, 7, **same), Node(model, **same | other), Node(model, **same)]

    async def scenario() -> tuple[Answers, int]:
        async with core_over(nodes, tokenizer) as core, asyncio.timeout(60):
            pool: WorkerPool = core.named(None).backend  # type: ignore[assignment]
            return await answers(core, call, 1), pool.lost_requests.num_continued

    got, num_continued = asyncio.run(scenario())
    num_elsewhere = nodes[1].engine.stats().num_generated_tokens
    for node in nodes:
        node.stop()
    assert (got, num_continued, num_elsewhere) == (expected, 1, 0)


def test_without_a_worker_of_the_same_weights_it_ends_and_what_is_new_does_not(model, tokenizer):
    nodes = [Node(model, 5, weights="fp32"), Node(model, weights="bf16")]

    async def scenario() -> tuple[str, Answers]:
        async with core_over(nodes, tokenizer) as core, asyncio.timeout(60):
            core.named(None).backend._lost_wait_s = 0.5  # type: ignore[attr-defined]
            code = ""
            try:
                async for _ in core.run(await core.prepare(made(max_tokens=1500))):
                    pass
            except ServiceError as error:
                code = error.code
            return code, await answers(core, made(), 1)

    code, got = asyncio.run(scenario())
    num_elsewhere = nodes[1].engine.stats().num_generated_tokens
    for node in nodes:
        node.stop()
    assert code == "worker_lost"
    assert len(got.ids[0]) == num_elsewhere == 40


class Fatal(Node):
    """A worker that ends when it has to compute a prompt with a certain token."""

    TOKEN = 1999

    def __init__(self, model: Any):
        super().__init__(model)
        step = self.engine.step

        def step_or_end() -> list[Delta]:
            if any(Fatal.TOKEN in seq.token_ids for seq in self.engine._sequences.values()):
                raise RuntimeError("a fatal request")
            return step()

        self.engine.step = step_or_end  # type: ignore[method-assign]


def test_a_request_that_ends_workers_is_refused_and_the_others_are_answered(model, tokenizer):
    """Each worker that ends is replaced; the requests beside the fatal one continue."""
    nodes = [Fatal(model), Fatal(model)]
    fatal = made((5, Fatal.TOKEN, 7))
    good = [made((5, 6, 7 + n), max_tokens=300) for n in range(5)]
    expected = [outcome(model, tokenizer, each, 1, [None])[0] for each in good]

    async def scenario() -> tuple[list[Answers], list[str], int]:
        async with core_over(nodes, tokenizer) as core, asyncio.timeout(200):
            pool: WorkerPool = core.named(None).backend  # type: ignore[assignment]

            async def replace_workers() -> None:
                while True:
                    for i, node in enumerate(nodes):
                        if not node.thread.alive:
                            nodes[i] = await asyncio.to_thread(Fatal, model)
                    pool.update([node.channel.info for node in nodes])
                    await asyncio.sleep(0.05)

            replacing = asyncio.ensure_future(replace_workers())
            calls = [asyncio.ensure_future(answers(core, each, 1)) for each in good]
            await until(lambda: sum(node.channel.num_requests for node in nodes) == len(good))
            codes = []
            for _ in range(2):  # and again, as clients do
                with pytest.raises(ServiceError) as refusal:
                    await answers(core, fatal, 1)
                codes.append(refusal.value.code)
            num_refused = pool.lost_requests.num_refused
            got = await asyncio.gather(*calls)
            replacing.cancel()
            return got, codes, num_refused

    got, codes, num_refused = asyncio.run(scenario())
    for node in nodes:
        node.stop()
    assert codes == ["request_killed_workers"] * 2 and num_refused == 1
    assert got == expected
    assert all(each.ends[0][0] is FinishReason.LENGTH for each in got)


@pytest.mark.parametrize("hangs", ["in a step", "turns without progress"])
def test_a_hung_engine_loses_its_requests_to_others_within_seconds(
    model, tokenizer, monkeypatch, hangs
):
    monkeypatch.setattr(thread, "STALL_S", 1.0)
    monkeypatch.setattr(server, "REPORT_S", 0.2)
    call = made(max_tokens=1000)
    expected, _ = outcome(model, tokenizer, call, 1, [None])
    nodes = [Node(model), Node(model)]
    is_hung, step = threading.Event(), nodes[0].engine.step
    has_hung = threading.Event()
    is_stalled: Any = vars(EngineThread)["is_stalled"].fget

    def is_the_hung_one(of: EngineThread) -> bool:
        """A machine that stands still for a second looks the same: of no other engine."""
        return of is nodes[0].thread and has_hung.is_set() and bool(is_stalled(of))

    monkeypatch.setattr(EngineThread, "is_stalled", property(is_the_hung_one))

    def step_or_hang() -> list[Delta]:
        while is_hung.is_set():
            time.sleep(0.01)
            if hangs == "turns without progress":
                return []
        return step()

    monkeypatch.setattr(nodes[0].engine, "step", step_or_hang)

    async def scenario() -> tuple[Answers, int, bool]:
        async with core_over(nodes, tokenizer) as core, asyncio.timeout(120):
            got = Answers()
            async for index, piece in core.run_many(await core.prepare_choices(call, 1)):
                got.add(index, piece)
                if len(got.ids[0]) > 20:
                    is_hung.set()
                    has_hung.set()
            pool: WorkerPool = core.named(None).backend  # type: ignore[assignment]
            link = pool._links[nodes[0].channel.info.epoch]
            assert not link.takes_requests or hangs == "turns without progress"
            is_hung.clear()
            while not link.takes_requests:  # it computes again, or has nothing to do
                await asyncio.sleep(0.02)
            return got, pool.lost_requests.num_continued, link.is_connected

    got, num_continued, is_connected = asyncio.run(scenario())
    for node in nodes:
        node.stop()
    assert got == expected and num_continued == 1 and is_connected
