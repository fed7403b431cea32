"""The request core: the same checks and the same text for every front end, whatever happens."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.ingress.core.call import (
    Call,
    CallContext,
    CallOptions,
    ChatPrompt,
    is_client_id,
)
from penstock.deployments.ingress.core.errors import CATALOGUE, ServiceError, describe
from penstock.deployments.ingress.core.prompts import MAX_MESSAGES
from penstock.deployments.ingress.core.streams import MAX_INLINE_SIZE
from penstock.workers.request import FinishReason, RequestError, SamplingParams
from tests.deployments.serving import (
    MODEL,
    EngineBackend,
    ScriptedBackend,
    core_over,
    generated,
    model,
    reference_ids,
    tokenizer,
)
from tests.deployments.waiting import eventually, undisturbed

SEEDED = {"temperature": 1.0, "seed": 11, "ignore_eos": True}  # varied, and yet reproducible
PROMPT = "It was a bright morning, and"
HELLO = ChatPrompt(({"role": "user", "content": "Hello"},))


@pytest.fixture(scope="module")
def engine_backend():
    backend = EngineBackend()
    yield backend
    backend.stop()


def collect(core, call):
    """All pieces of one call, and the error that ended it, if one did."""

    async def run():
        pieces, error = [], None
        try:
            async for piece in generated(core, call):
                pieces.append(piece)
        except (RequestError, ServiceError) as failure:
            error = failure
        return pieces, error

    return asyncio.run(run())


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def seeded(prompt=PROMPT, *, num_new=24, **params):
    return Call(prompt, SamplingParams(max_tokens=num_new, **{**SEEDED, **params}))


# Text from the real engine


def test_text_is_what_the_engine_generates(engine_backend):
    core = core_over(engine_backend)
    prompt_ids = tokenizer().encode(PROMPT)
    expected = reference_ids(prompt_ids, max_tokens=24, **SEEDED)
    for prompt in (PROMPT, tuple(prompt_ids)):
        pieces, error = collect(core, seeded(prompt))
        assert error is None
        assert [i for piece in pieces for i in piece.token_ids] == expected
        assert text_of(pieces) == tokenizer().decode(expected, skip_special_tokens=True)
        last = pieces[-1]
        assert (last.finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens) == (
            FinishReason.LENGTH,
            len(prompt_ids),
            24,
        )
        assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_chat_is_the_rendered_template(engine_backend):
    core = core_over(engine_backend)
    rendered = tokenizer().render_chat(HELLO.messages)
    ids = tokenizer().encode(rendered, add_special_tokens=False)
    pieces, _ = collect(core, seeded(HELLO))
    assert [i for piece in pieces for i in piece.token_ids] == reference_ids(
        ids, max_tokens=24, **SEEDED
    )
    developer = ChatPrompt(({"role": "developer", "content": "x"}, *HELLO.messages))
    system = ChatPrompt(({"role": "system", "content": "x"}, *HELLO.messages))
    assert text_of(collect(core, seeded(developer))[0]) == text_of(collect(core, seeded(system))[0])


def test_a_seed_makes_the_answer_reproducible(engine_backend):
    core = core_over(engine_backend)
    sampled: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12}
    texts = [
        text_of(collect(core, Call(PROMPT, SamplingParams(seed=seed, **sampled)))[0])
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_cached_prompt_tokens_are_reported(engine_backend):
    core = core_over(engine_backend)
    long_prompt = "Once upon a time there was a mill. " * 8
    first, _ = collect(core, seeded(long_prompt, num_new=2))
    again, _ = collect(core, seeded(long_prompt, num_new=2))
    assert first[-1].usage.cached_tokens == 0
    assert 0 < again[-1].usage.cached_tokens < again[-1].usage.prompt_tokens


@pytest.mark.parametrize("where", [3, 9, 17])
def test_a_stop_string_cuts_the_text_and_frees_the_blocks(engine_backend, where):
    core = core_over(engine_backend)
    whole = text_of(collect(core, seeded(num_new=40))[0])
    stop = whole[where : where + 7]  # straddles tokens
    pieces, error = collect(core, seeded(num_new=40, stop=(stop,)))
    assert error is None
    assert text_of(pieces) == whole[: whole.index(stop)]
    last = pieces[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    num_tokens = sum(len(piece.token_ids) for piece in pieces)
    assert last.usage.completion_tokens == num_tokens < 40
    eventually(lambda: engine_backend.num_live_blocks == 0)


def test_stop_token_ids_are_counted_but_not_rendered(engine_backend):
    core = core_over(engine_backend)
    ids = reference_ids(tokenizer().encode(PROMPT), max_tokens=24, **SEEDED)
    stop_id = next(i for n, i in enumerate(ids) if n > 4 and i not in ids[:n])
    at = ids.index(stop_id)
    pieces, _ = collect(core, seeded(stop_token_ids=(stop_id,)))
    assert text_of(pieces) == tokenizer().decode(ids[:at], skip_special_tokens=True)
    last = pieces[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop_id)
    assert last.usage.completion_tokens == at + 1


def test_a_closed_answer_frees_its_blocks(engine_backend):
    core = core_over(engine_backend)

    async def leave_early():
        async with aclosing(generated(core, seeded(num_new=400))) as pieces:
            async for _ in pieces:
                return

    asyncio.run(leave_early())
    eventually(lambda: engine_backend.num_live_blocks == 0)


def test_many_answers_side_by_side(engine_backend):
    core = core_over(engine_backend)
    prompts = [PROMPT, "The sea", "Ah, my dear"]
    alone = [text_of(collect(core, seeded(prompt))[0]) for prompt in prompts]

    async def run():
        generations = [await core.prepare(seeded(prompt)) for prompt in prompts]
        texts, turns = [""] * 3, []
        async for index, piece in core.run_many(generations):
            texts[index] += piece.text
            turns.append(index)
        return texts, turns

    texts, turns = asyncio.run(run())
    assert texts == alone
    assert turns != sorted(turns), "one after the other instead of side by side"


# What an engine does not support


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_answer_does_not_depend_on_the_grouping_of_tokens(data):
    text = "abcabcab the water, the 水门 wall 👩‍👩‍👧 abca" * 2
    ids = tokenizer().encode(text)
    start = data.draw(st.integers(0, len(text) - 6))
    length = data.draw(st.integers(1, 6))
    min_tokens = data.draw(st.sampled_from((0, 0, 5)))
    params = SamplingParams(stop=(text[start : start + length], "zzz"), min_tokens=min_tokens)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=8)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    answers = []
    for script in (groups, [[token_id] for token_id in ids]):
        backend = ScriptedBackend(*script, FinishReason.LENGTH)
        pieces, _ = collect(core_over(backend), Call("a", params))
        usage = pieces[-1].usage
        answers.append((text_of(pieces), pieces[-1].stop_reason, usage.completion_tokens))
        assert sum(len(piece.token_ids) for piece in pieces) == usage.completion_tokens
        assert backend.num_closed == 1
    assert answers[0] == answers[1]
    if min_tokens == 0:
        assert answers[0][0] == text[: text.index(params.stop[0])]


def test_stop_strings_count_only_after_min_tokens():
    ids = tokenizer().encode("one two one two one two")
    per_pair = len(tokenizer().encode("one two"))
    pieces, _ = collect(
        core_over(ScriptedBackend(ids, FinishReason.LENGTH)),
        Call("a", SamplingParams(stop=("one",), min_tokens=per_pair + 1)),
    )
    assert text_of(pieces).startswith("one two")
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert pieces[-1].usage.completion_tokens > per_pair


def test_a_held_back_text_comes_with_the_end():
    ids = tokenizer().encode("over the wal")
    pieces, _ = collect(
        core_over(ScriptedBackend(*([i] for i in ids), FinishReason.LENGTH)),
        Call("a", SamplingParams(stop=("wall",))),
    )
    assert text_of(pieces) == "over the wal"
    assert text_of(pieces[:-1]) == "over the "


def test_an_unfinished_character_reads_as_replacement_at_the_end():
    ids = tokenizer().encode("👩")[:-1]
    pieces, _ = collect(core_over(ScriptedBackend(ids, FinishReason.LENGTH)), Call("a"))
    assert text_of(pieces) == "\ufffd"


def test_an_expired_call_never_reaches_the_backend():
    backend = ScriptedBackend([5], FinishReason.STOP)
    _, error = collect(
        core_over(backend), Call("a", context=CallContext(deadline_s=time.monotonic() - 0.001))
    )
    assert error.code == "deadline_exceeded"
    assert backend.requests == []


def test_a_deadline_in_mid_stream_drops_the_request():

    def attempt():
        backend = ScriptedBackend([5], 30.0)
        pieces, error = collect(
            core_over(backend), Call("a", context=CallContext(deadline_s=time.monotonic() + 0.2))
        )
        assert error.code == "deadline_exceeded"
        assert len(pieces) == 1
        assert backend.num_closed == 1

    undisturbed(attempt)


def test_cancel_wants_the_exact_id_and_the_same_principal():
    backend = ScriptedBackend([5], 30.0)
    core = core_over(backend)
    call = Call("a", context=CallContext(principal="me"))

    async def run():
        pieces = generated(core, call)
        await anext(pieces)
        assert not core.cancel(call.context.request_id[:-1], "me")
        assert not core.cancel(call.context.request_id, "you")
        assert not core.cancel(call.context.request_id)
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.01)
        assert core.cancel(call.context.request_id, "me")
        await asyncio.sleep(0)  # the wait is ending now: once more changes nothing
        assert core.cancel(call.context.request_id, "me")
        last = await waiting
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)
        assert not core.cancel(call.context.request_id, "me")
        return last

    last = asyncio.run(run())
    assert last.finish_reason is FinishReason.ABORT
    assert last.usage.completion_tokens == 1
    assert backend.num_closed == 1


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (([5], "numerical_error"), "numerical_error"),
        (("overloaded",), "overloaded"),
        (([5], "no such code, /secret/path"), "internal_error"),
        (([5],), "worker_lost"),  # ended without a reason
    ],
)
def test_failures_have_a_code_of_the_catalogue(script, code):
    _, error = collect(core_over(ScriptedBackend(*script)), Call("a"))
    assert isinstance(error, ServiceError)
    assert error.code == code


class InTurn:
    """Each request goes to the next of these backends."""

    def __init__(self, *backends):
        self.turn = iter(backends)

    def generate(self, request):
        return next(self.turn).generate(request)


def test_one_failing_answer_ends_its_neighbours():
    slow = ScriptedBackend([5], 30.0)
    core = core_over(InTurn(slow, ScriptedBackend([5], "numerical_error")))

    async def run():
        generations = [await core.prepare(Call("a")) for _ in range(2)]
        with pytest.raises(ServiceError, match="numerical_error"):
            async for _ in core.run_many(generations):
                pass

    asyncio.run(run())
    assert slow.num_closed == 1


# Checks


@pytest.fixture(scope="module")
def refusing():
    backend = ScriptedBackend("internal_error")
    yield core_over(backend, max_model_len=64)
    assert backend.requests == [], "a call that must be refused reached the backend"


VOCAB = 8192
REFUSED = {
    "an unknown model": (
        Call("a", options=CallOptions(model="gpt\n5")),
        "model_not_found",
        "model",
        "'gpt\\n5'",
    ),
    "an empty prompt": (Call(""), "invalid_value", "prompt", "empty"),
    "no ids": (Call(()), "invalid_value", "prompt", "empty"),
    "an id that is none": (Call((VOCAB,)), "invalid_value", "prompt", f"{VOCAB}"),
    "a negative id": (Call((-1,)), "invalid_value", "prompt", "[0,"),
    "half a surrogate": (Call("a\ud800"), "invalid_value", "prompt", "surrogate"),
    "half a surrogate in stop": (
        Call("a", SamplingParams(stop=("\udc00",))),
        "invalid_value",
        "stop",
        "surrogate",
    ),
    "a long prompt": (Call((5,) * 64), "context_length_exceeded", "prompt", "64"),
    "a very long text": (Call("a" * 10**6), "context_length_exceeded", "prompt", "1000000"),
    "too many tokens": (
        Call((5,) * 60, SamplingParams(max_tokens=5)),
        "context_length_exceeded",
        "max_tokens",
        "can be at most 4",
    ),
    "too many least tokens": (
        Call((5,) * 60, SamplingParams(min_tokens=5)),
        "context_length_exceeded",
        "min_tokens",
        "can be at most 4",
    ),
    "many stops": (Call("a", SamplingParams(stop=("x",) * 17)), "invalid_value", "stop", "16"),
    "a long stop": (Call("a", SamplingParams(stop=("x" * 257,))), "invalid_value", "stop", "256"),
    "an empty stop": (Call("a", SamplingParams(stop=("",))), "invalid_value", "stop", "1 to"),
    "heat": (Call("a", SamplingParams(temperature=-0.1)), "invalid_value", "temperature", "100"),
    "no number": (Call("a", SamplingParams(top_p=float("nan"))), "invalid_value", "top_p", "1"),
    "no messages": (Call(ChatPrompt(())), "invalid_value", "messages", "1 to"),
    "many messages": (
        Call(ChatPrompt(({"role": "user", "content": ""},) * (MAX_MESSAGES + 1))),
        "invalid_value",
        "messages",
        "1 to",
    ),
    "a strange role": (
        Call(ChatPrompt(({"role": "root", "content": "x"},))),
        "invalid_value",
        "messages",
        "messages[0].role",
    ),
    "half a surrogate in a message": (
        Call(ChatPrompt(({"role": "user", "content": "\ud800"},))),
        "invalid_value",
        "messages",
        "surrogate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(refusing, name):
    call, code, param, words = REFUSED[name]
    pieces, error = collect(refusing, call)
    assert pieces == []
    assert isinstance(error, RequestError)
    assert (error.code, error.param) == (code, param)
    assert words in error.message


def test_a_prompt_that_just_fits_is_served():
    core = core_over(ScriptedBackend([5], FinishReason.LENGTH), max_model_len=64)
    for call in (Call((5,) * 63), Call((5,) * 60, SamplingParams(max_tokens=4)), Call("a\x00b")):
        assert collect(core, call)[1] is None


def test_long_text_is_tokenised_beside_the_loop():
    """The loop turns while a long text is encoded."""
    core = core_over(ScriptedBackend(), max_model_len=10**6)
    text = "The penstock feeds the turbine. " * 8000
    assert len(text) > MAX_INLINE_SIZE

    async def run():
        encoding = asyncio.ensure_future(core.tokenize(text))
        turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns, await encoding

    turns, ids = asyncio.run(run())
    assert turns > 3
    assert ids == tokenizer().encode(text)
    assert asyncio.run(core.detokenize(ids, skip_special_tokens=True)) == text


def test_tokenize_and_detokenize_check_what_they_get(refusing):
    for bad in (
        refusing.tokenize("\ud800"),
        refusing.tokenize("a", model="b"),
        refusing.detokenize([VOCAB], skip_special_tokens=False),
        refusing.detokenize([1], model="b", skip_special_tokens=False),
    ):
        with pytest.raises(RequestError):
            asyncio.run(bad)


def test_client_ids():
    assert is_client_id("a" * 128)
    assert is_client_id("A-1_b.c")
    for bad in ("", "a" * 129, "a b", "a\n", "ü", "a/b"):
        assert not is_client_id(bad)


# Error messages and logs


def test_one_line_a_request_and_no_prompt_in_it(caplog):
    caplog.set_level(logging.INFO, "penstock.requests")
    backend = ScriptedBackend([5, 6], FinishReason.LENGTH)
    core = core_over(backend, max_model_len=64)
    collect(core, Call("secret words", context=CallContext(front="http", client_id="mine")))
    collect(
        core,
        Call(
            "secret words",
            options=CallOptions(model="x\n\x1b[31m"),
            context=CallContext(front="h\n{}"),
        ),
    )
    collect(core_over(ScriptedBackend([5], "numerical_error")), Call("secret words"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert not any("secret" in line or "\n" in line or "\x1b" in line for line in lines)
    done, refused, failed = map(json.loads, lines)
    assert done["finish"] == "length"
    assert (done["completion_tokens"], done["client_id"], done["front"]) == (2, "mine", "http")
    assert 0 <= done["ttft_s"] <= done["ttft_s"] + done["decode_s"] <= done["total_s"] + 0.001
    assert done["queue_s"] is done["prefill_s"] is None  # a script has no queue
    assert refused["finish"] == "model_not_found"
    assert failed["finish"] == "numerical_error"


def test_a_client_that_left_is_logged_as_such(caplog):
    caplog.set_level(logging.INFO, "penstock.requests")
    core = core_over(ScriptedBackend([5], 30.0))

    async def run():
        pieces = generated(core, Call("a"))
        await anext(pieces)
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert json.loads(caplog.records[-1].getMessage())["finish"] == "disconnect"


def test_unexpected_errors_are_reported_by_id_only(caplog):
    error = describe(KeyError("/secret/path"), "some-id", Counter())
    assert error.code == "internal_error"
    assert "secret" not in error.message
    assert "some-id" in error.message
    assert "secret" in caplog.text
    known = describe(RequestError("top_k is odd", param="top_k"), "some-id", Counter())
    assert (known.code, known.message, known.param) == ("invalid_value", "top_k is odd", "top_k")
    made_up = describe(RequestError("from inside", code="made_up"), "some-id", Counter())
    assert (made_up.code, "inside" in made_up.message) == ("internal_error", False)


def test_the_catalogue_is_whole():
    statuses = {
        400,
        401,
        403,
        404,
        405,
        408,
        409,
        413,
        414,
        415,
        421,
        422,
        429,
        431,
        500,
        501,
        503,
        504,
    }
    documented = (Path(__file__).parents[4] / "docs" / "reference" / "errors.md").read_text()
    for code, entry in CATALOGUE.items():
        assert entry.http_status in statuses, code
        assert entry.message
        assert hasattr(grpc.StatusCode, entry.grpc_status)
        assert f"`{code}`" in documented
        assert (entry.http_status < 500) == (entry.openai_type != "server_error") or code == (
            "deadline_exceeded"
        )


def test_the_model_is_named(engine_backend):
    core = core_over(engine_backend)
    (served,) = core.models()
    assert (served.name, served.vocab_size) == (MODEL, model().config.vocab_size)
    assert served.has_chat_template
    assert core.model("") is core.model(None) is core.model(MODEL)
