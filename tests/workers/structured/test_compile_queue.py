"""Compiling grammars while the engine runs: cancelled requests never run, bad ones are refused."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from penstock.workers.engine.thread import EngineThread
from penstock.workers.request import Delta, FinishReason, Request, SamplingParams
from penstock.workers.structured.compile_queue import (
    MAX_WAITING,
    MAX_WAITING_OF_TENANT,
    CompiledRequest,
    GrammarCompileQueue,
)
from penstock.workers.structured.grammar import GrammarCompiler
from tests.workers.builtin_grammars import model, tokenizer
from tests.workers.structured.test_grammar import any_json_object, new_engine, regex


def new_compiler(load: Any = None) -> GrammarCompiler:
    return GrammarCompiler(
        load or (lambda: tokenizer().to_json()),
        vocab_size=model().config.vocab_size,
        eos_token_ids=model().config.eos_token_ids,
    )


class SlowTokenizer:
    """Holds every compilation up until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self) -> str:
        assert self.go.wait(60)
        return tokenizer().to_json()


def request(name: str, spec: Any = None) -> Request:
    params = SamplingParams(max_tokens=4, structured=spec or regex("a{9}"))
    return Request(name, (5, 6, 7), params)


def test_a_request_cancelled_while_it_waits_is_never_heard_of() -> None:
    slow, done = SlowTokenizer(), queue.SimpleQueue[CompiledRequest]()
    intake = GrammarCompileQueue(new_compiler(slow), done.put)
    for name in ("a", "b", "c", "d"):
        intake.submit(request(name))
    intake.cancel("b")
    intake.cancel("d")
    slow.go.set()
    assert {done.get(timeout=60).request.request_id for _ in range(2)} == {"a", "c"}
    intake.close()
    assert done.empty()


def test_the_line_is_bounded() -> None:
    slow, done = SlowTokenizer(), queue.SimpleQueue[CompiledRequest]()
    intake = GrammarCompileQueue(new_compiler(slow), done.put)
    for i in range(MAX_WAITING + 1):
        intake.submit(request(str(i)))
    refusal = done.get(timeout=60).refusal
    assert refusal is not None and refusal.code == "overloaded"
    for i in range(MAX_WAITING):
        intake.cancel(str(i))
    slow.go.set()
    intake.close()


class MessageSink:
    def __init__(self) -> None:
        self.deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def __call__(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.deltas.put(delta)

    def until_end(self, name: str) -> Delta:
        while True:
            delta = self.deltas.get(timeout=60)
            if delta.request_id == name and delta.finish_reason is not None:
                return delta


@pytest.fixture
def thread() -> Any:
    sink, slow = MessageSink(), SlowTokenizer()
    started = EngineThread(new_engine(), sink, num_threads=1, grammars=new_compiler(slow))
    started.start()
    yield started, sink, slow
    slow.go.set()
    started.stop()


def test_others_go_on_while_a_grammar_compiles(thread: Any) -> None:
    engine, sink, slow = thread
    engine.submit(request("shaped"))
    engine.submit(Request("free", (5, 6), SamplingParams(max_tokens=4, ignore_eos=True)))
    assert sink.until_end("free").finish_reason is FinishReason.LENGTH
    slow.go.set()
    assert sink.until_end("shaped").finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_refusals_say_what_is_wrong(thread: Any) -> None:
    engine, sink, slow = thread
    slow.go.set()
    engine.submit(request("bad", regex("(?=a)")))
    last = sink.until_end("bad")
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "invalid_value")
    assert last.error_param == "p" and "look-around" in last.error_message
    engine.submit(Request("good", (5,), any_json_object(1, max_tokens=3)))
    assert sink.until_end("good").finish_reason is FinishReason.LENGTH


def test_a_tokenizer_that_cannot_be_used_is_said_so() -> None:
    done = queue.SimpleQueue[CompiledRequest]()
    intake = GrammarCompileQueue(new_compiler(lambda: '{"no": "tokenizer"}'), done.put)
    intake.submit(request("a"))
    refusal = done.get(timeout=60).refusal
    intake.close()
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("unsupported_parameter", "p")


def of_tenant(name: str, tenant: bytes) -> Request:
    return replace(request(name), cache_domain=tenant)


def test_tenants_take_turns_and_one_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.structured.compile_queue.NUM_HELPERS", 1)
    slow, done = SlowTokenizer(), queue.SimpleQueue[CompiledRequest]()
    intake = GrammarCompileQueue(new_compiler(slow), done.put)
    first = request("first")
    intake.submit(first)
    while intake._turns:  # until it has begun, and holds the thread
        time.sleep(0.01)
    for number in range(MAX_WAITING_OF_TENANT):
        intake.submit(of_tenant(f"a{number}", b"a" * 16))
    intake.submit(of_tenant("too much", b"a" * 16))
    refused = done.get(timeout=60)
    assert refused.request.request_id == "too much"
    assert refused.refusal is not None and refused.refusal.code == "overloaded"
    for number in range(2):
        intake.submit(of_tenant(f"b{number}", b"b" * 16))
    intake.submit(request("c0"))
    slow.go.set()
    order = [done.get(timeout=60).request.request_id for _ in range(8)]
    assert order == ["first", "a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    intake.close()
