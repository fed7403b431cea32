"""Scores go with the text of their tokens, whole, in order and once; and read well as JSON."""

from __future__ import annotations

import asyncio
import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, TokenUsage
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.logprobs import (
    UNLIKELY,
    AlternativeToken,
    DecodedLogprob,
    LogprobQueue,
    decode_logprob,
    decode_prompt_logprobs,
)
from penstock.deployments.ingress.core.prompts import bad_words_ids
from penstock.deployments.ingress.core.validation import nth_choice
from penstock.deployments.ingress.http.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from penstock.workers.request import Delta, FinishReason, SamplingParams, TokenLogprob
from tests.deployments.serving import ScriptedBackend, core_over, generated, tokenizer

# What each token adds to the text, and how much of the whole text is out after it.
texts = st.lists(st.text("ab", max_size=3), max_size=12)


@settings(max_examples=200, deadline=None)
@given(texts, st.data())
def test_each_score_waits_for_its_text(added, data):
    queue, out, num_sent, given_out = LogprobQueue(), "", 0, []
    for token_id, text in enumerate(added):
        queue.add(DecodedLogprob(token_id, text.encode()), text)
        out += text
        num_sent = data.draw(st.integers(num_sent, len(out)))
        for score in queue.release(num_sent):
            end = len("".join(added[: score.token_id + 1]))
            assert end <= num_sent
            given_out.append(score)
        # Nothing else is held. A token of no text goes with the next one that has some.
        shown = [i for i in range(token_id + 1) if added[i]]
        ends = {i: len("".join(added[: i + 1])) for i in shown}
        due = max((i + 1 for i in shown if ends[i] <= num_sent), default=0)
        assert len(given_out) == due
    given_out += queue.release_all(len(out))
    assert [score.token_id for score in given_out] == list(range(len(added)))
    offsets = [len("".join(added[:i])) for i in range(len(added))]
    assert [score.text_offset for score in given_out] == offsets


def test_offsets_do_not_lie_beyond_a_cut_text():
    queue = LogprobQueue()
    for token_id in range(3):
        queue.add(DecodedLogprob(token_id, b"ab"), "ab")
    assert [each.text_offset for each in queue.release_all(3)] == [0, 2, 3]


SPELT = {1: b"a", 2: b"\xe6\xb0", 3: b"\xb4", 4: b"a"}


def test_what_is_unlikely_or_no_number_is_json():
    token = TokenLogprob(1, -math.inf, 9, ((2, math.nan), (3, -1.0)))
    decoded = decode_logprob(token, 1, SPELT.__getitem__)
    assert (decoded.logprob, decoded.top) == (
        UNLIKELY,
        (AlternativeToken(2, b"\xe6\xb0", UNLIKELY),),
    )
    for shape in (chat_logprobs, completion_logprobs, prompt_logprobs):
        json.dumps(shape([decoded]), allow_nan=False)


def test_parts_of_characters():
    """Their bytes join to the character; as keys they differ."""
    tokens = [TokenLogprob(2, -1.0, 1, ((2, -1.0), (3, -2.0))), TokenLogprob(3, -0.5, 1, ())]
    scores = [decode_logprob(each, 20, SPELT.__getitem__) for each in tokens]
    content = chat_logprobs(scores)["content"]
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "水"
    assert content[0]["token"] == "\ufffd"
    rendered = completion_logprobs(scores)
    assert rendered["tokens"] == ["bytes:\\xe6\\xb0", "bytes:\\xb4"]
    assert rendered["top_logprobs"][0] == {"bytes:\\xe6\\xb0": -1.0, "bytes:\\xb4": -2.0}


def test_of_tokens_that_read_alike_the_likelier_counts_but_for_the_one_that_came():
    unchosen = decode_logprob(
        TokenLogprob(3, -3.0, 4, ((1, -1.0), (4, -2.0))), 2, SPELT.__getitem__
    )
    assert completion_logprobs([unchosen])["top_logprobs"] == [{"a": -1.0, "bytes:\\xb4": -3.0}]
    chosen = decode_logprob(TokenLogprob(4, -2.0, 2, ((1, -1.0), (4, -2.0))), 2, SPELT.__getitem__)
    assert completion_logprobs([chosen])["top_logprobs"] == [{"a": -2.0}]
    by_id = prompt_logprobs(
        decode_prompt_logprobs([1, 4], [TokenLogprob(4, -2.0, 2)], 2, SPELT.__getitem__)
    )
    assert by_id == [None, {"4": {"logprob": -2.0, "rank": 2, "decoded_token": "a"}}]


# What the engine is to compute


def test_seeds_of_choices():
    seeds = {nth_choice(SamplingParams(seed=s), i).seed for s in (-(2**63), 0, 1) for i in range(8)}
    assert len(seeds) == 24
    for seed in seeds:
        SamplingParams(seed=seed).check(10)
    assert nth_choice(SamplingParams(), 3).seed is None


def test_both_spellings_of_bad_words():
    def encode(text):
        return tokenizer().encode(text, add_special_tokens=False)

    bare, spaced = encode("river"), encode(" river")
    assert bare != spaced[-len(bare) :]
    for words in (["river"], ["  river"], ["river", " river"]):
        assert bad_words_ids(words, encode) == (tuple(bare), tuple(spaced))
    letters = {" ": 0, "a": 1}
    assert bad_words_ids(["a"], lambda text: [letters[char] for char in text]) == ((1,),)


def test_usage_counts_a_shared_prompt_once():
    own, shared = TokenUsage(5, 2, 1), TokenUsage(5, 3, 4, shares_prompt=True)
    assert TokenUsage.total([shared, own]) == TokenUsage(5, 5, 1)
    assert TokenUsage.total([own, own]) == TokenUsage(10, 4, 2)


# Several answers on one backend


def ran(core, call, num_choices):
    """(texts by choice, error) of a call."""

    async def run():
        got: dict[int, str] = {}
        try:
            generations = await core.prepare_choices(call, num_choices)
            async for index, piece in core.run_many(generations):
                got[index] = got.get(index, "") + piece.text
        except ServiceError as failure:
            return got, failure.code
        return got, None

    return asyncio.run(asyncio.wait_for(run(), 10))


def test_the_others_wait_for_the_first():
    """Until its first token; and no longer than that."""
    backend = ScriptedBackend([5], 0.1, [6], FinishReason.LENGTH)
    seen = []

    class Watching:
        ready = backend.ready

        async def generate(self, request):
            seen.append(request.request_id)
            async for delta in backend.generate(request):
                if request.request_id == "c":
                    seen.append(len(delta.token_ids))
                yield delta

    texts, error = ran(core_over(Watching()), Call("a", context=CallContext(request_id="c")), 3)
    assert error is None
    assert seen[:2] == ["c", 1]  # its first token came before the others began
    assert set(seen[2:4]) == {"c.1", "c.2"}
    assert len(set(texts.values())) == 1 and len(texts) == 3


def test_a_first_answer_that_fails_ends_the_others():
    core = core_over(ScriptedBackend("numerical_error"))
    assert ran(core, Call("a"), 4) == ({}, "numerical_error")
    assert not core._running


def test_the_deadline_is_that_of_all():
    core = core_over(ScriptedBackend(30.0))

    async def call():
        deadline_s = asyncio.get_running_loop().time() + 0.05
        return Call("a", context=CallContext(deadline_s=deadline_s))

    assert ran(core, asyncio.run(call()), 2) == ({}, "deadline_exceeded")


def test_a_delta_of_several_tokens_has_the_scores_of_each():
    """As when a slow reader gets several steps in one; tokens after a stop string have none."""
    ids = tokenizer().encode("one two three", add_special_tokens=False)
    scores = [TokenLogprob(i, -float(n), n + 1) for n, i in enumerate(ids)]

    class Backend(ScriptedBackend):
        async def generate(self, request):
            yield Delta(request.request_id, ids, FinishReason.LENGTH, logprobs=scores)

    async def run(**params):
        call = Call("a", SamplingParams(logprobs=0, **params))
        return [piece async for piece in generated(core_over(Backend()), call)]

    (whole,) = asyncio.run(run())
    assert [each.logprob for each in whole.logprobs] == [each.logprob for each in scores]
    (cut,) = asyncio.run(run(stop=(" two",)))
    assert cut.text == "one"
    assert len(cut.logprobs) == cut.usage.completion_tokens < len(ids)


def test_many_scores_are_spelt_beside_the_loop():
    """The loop turns while a long prompt's scores are made; the result is the same."""
    ids = tokenizer().encode("The river ran to the sea. " * 600)
    top = tuple((i, -1.0) for i in range(20))
    scores = [TokenLogprob(i, -1.0, 1, top) for i in ids[1:]]

    class Backend(ScriptedBackend):
        async def generate(self, request):
            assert request.request.params.prompt_logprobs == 20
            yield Delta(request.request_id, [5], FinishReason.LENGTH, prompt_logprobs=scores)

    async def run():
        params = SamplingParams(max_tokens=0, logprobs=20)
        core = core_over(Backend(), max_model_len=10**5)
        generation = await core.prepare(Call(tuple(ids), params, CallOptions(echo=True)))
        answering = asyncio.ensure_future(anext(core.run(generation)))
        turns = 0
        while not answering.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns, await answering

    turns, (_, piece) = asyncio.run(run())
    assert turns > 5
    assert [each.token_id for each in piece.logprobs] == ids
    assert piece.text == tokenizer().decode(ids, skip_special_tokens=True)
