"""Answers with drafts are those of plain decoding, bit for bit, whatever is proposed.

The oracle is the same engine without drafts, whose own oracle is transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import VOCAB_SIZE, make_checkpoint, random_prompt
from tests.workers.commit_rules import stays_always
from tests.workers.execution.test_cuda_graphs import Recorder
from tests.workers.speculation.proposers import Adversary, Fixed, Mixed, Oracle, Widest

if native.bound.library is None:
    pytest.skip("PyTorch's products have other bits for other sizes", allow_module_level=True)

PROPOSERS = {"oracle": Oracle, "adversary": Adversary, "mixed": Mixed}
SINKS: dict[str, Any] = {"context_policy": "sink_window", "sinks": 4, "window": 24, "roll": 8}
GREEDY: dict[str, Any] = {"temperature": 0.0}
# Settings of the engine, weights, and parameters of the requests.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "greedy": ({}, "fp32", GREEDY),
    "sampled": ({}, "fp32", {"temperature": 0.7, "top_k": 40, "top_p": 0.9}),
    "hot": ({}, "fp32", {"temperature": 1.3, "min_p": 0.02}),
    "penalties": (
        {},
        "fp32",
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.9},
    ),
    "bias": ({}, "fp32", {"logit_bias": ((3, 4.0), (7, -5.0)), "frequency_penalty": 1.5}),
    "few allowed": ({}, "fp32", {"allowed_token_ids": tuple(range(20, 60))}),
    "ends": (
        {},
        "fp32",
        {"stop_token_ids": tuple(range(40)), "min_tokens": 9, "ignore_eos": False},
    ),
    "bad words": (
        {},
        "fp32",
        {"bad_words_ids": (*((i, j) for i in range(30) for j in (1, 4)), (5,), (1, 2, 3))},
    ),
    "logprobs": ({}, "fp32", {"logprobs": 3}),
    "greedy logprobs": ({}, "bf16", {**GREEDY, "logprobs": 2}),
    "prompt logprobs": ({}, "fp32", {"prompt_logprobs": 1, "logprobs": 1}),
    "sinks": ({}, "fp32", SINKS),
    "sinks, int8 KV": ({"kv": "int8", "kv_group": "8"}, "fp32", {**GREEDY, **SINKS}),
    "fp8 KV, int4": ({"kv": "fp8"}, "int4", GREEDY),
    "int8": ({}, "int8", {"logprobs": 1}),
    "nf4": ({}, "nf4", GREEDY),
    "fp8": ({}, "fp8", GREEDY),
    "chunks": ({"max_num_batched_tokens": 18, "max_num_seqs": 4}, "fp32", {}),
    "few rows": ({"max_num_seqs": 2, "max_num_batched_tokens": 16}, "fp32", {}),
    "no prefix cache": ({"prefix_cache": False}, "fp32", GREEDY),
    "separate activations": ({"activation_memory": "separate"}, "fp32", GREEDY),
    "separate steps": ({"merge_steps": False}, "fp32", {}),
    "ahead": ({"async_scheduling": "on"}, "fp32", {}),
    "ahead, sinks": ({"async_scheduling": "on"}, "fp32", SINKS),
}
DISTURBED: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks": 36},
    "preempted, no prefix cache": {"num_blocks": 36, "prefix_cache": False},
    "deferred": {"num_blocks": 36, "kv_commit": "deferred"},
    "always deferred": {"kv_commit": "deferred", "kv_defer_mode": "always"},
    "host memory": {"num_blocks": 36, "host_kv_gb": 0.01},
    "ahead, preempted": {"num_blocks": 36, "async_scheduling": "on"},
}


@functools.cache
def model_of(name: str, weights: str) -> Decoder:
    torch.set_num_threads(1)
    return load_model(make_checkpoint(name), weights=weights, progress=False)


def requests_of(params: dict[str, Any], num_new: int = 30) -> list[Request]:
    made = []
    for i, length in enumerate((30, 47, 5, 61)):
        values = {"max_tokens": num_new + i, "ignore_eos": True, "seed": i, **params}
        prompt = tuple(random_prompt(length, seed=length))
        made.append(Request(f"r{i}", prompt, SamplingParams(**values)))
    return made


def engine_of(
    model: Decoder,
    given: dict[str, Any],
    proposer: Fixed | None = None,
    widths: Any = None,
    **more: Any,
) -> Engine:
    """With drafts of `proposer`; its fresh memory is all NaN."""
    fixed = {"num_blocks": 512, "block_size": 4, "max_num_seqs": 8}
    speculate = "off" if proposer is None else "lookup"
    config = EngineConfig(**{**fixed, "speculate": speculate, **given})
    drafts = None if proposer is None else (proposer, widths or Widest())
    engine = Engine(config, model, speculation=drafts, **more)
    engine.arena.storage.fill_(0xFF)
    return engine


def said(deltas: dict[str, list[Delta]]) -> dict[str, list[Any]]:
    """All that clients see of each answer but the counts of drafts."""
    plain: dict[str, Any] = {
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "times": None,
        "events": [],
    }
    return {
        name: [dataclasses.replace(delta, **plain) for delta in each]
        for name, each in deltas.items()
    }


def indexed(engine: Engine) -> set[tuple[bytes, bytes, bytes]]:
    """The contents that the prefix cache can find."""
    index = engine.pool.index
    return {index.content_of(block) for block in range(engine.pool.num_blocks) if block in index}


@pytest.fixture(autouse=True)
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the prefix cache can be compared between engines."""
    monkeypatch.setattr("penstock.workers.engine.build.secrets.token_bytes", lambda num: b"s" * num)


@functools.cache
def plain(case: str) -> tuple[dict[str, list[Delta]], set[tuple[bytes, bytes, bytes]]]:
    given, weights, params = CASES[case]
    engine = engine_of(model_of("llama", weights), given)
    return answers(engine, requests_of(params)), indexed(engine)


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("case", CASES)
def test_an_answer_with_drafts_is_that_of_plain_decoding(case, kind):
    """Ids, logprobs as floats, ends, usage, and what the prefix cache has afterwards."""
    given, weights, params = CASES[case]
    expected, keys = plain(case)
    known = {name: ids_of(deltas) for name, deltas in expected.items()}
    proposer = PROPOSERS[kind](known, VOCAB_SIZE)
    engine = engine_of(model_of("llama", weights), given, proposer)
    found = answers(engine, requests_of(params))
    assert said(found) == said(expected)
    assert indexed(engine) == keys
    assert proposer.num_ended == len(known)
    assert proposer.num_verified > 0, "no draft was verified"
    assert (proposer.num_accepted > 0) == (kind != "adversary")
    stats = engine.stats()
    assert sum(stats.num_draft_tokens.values()) == proposer.num_verified
    assert sum(stats.num_accepted_tokens.values()) == proposer.num_accepted
    last = [deltas[-1] for deltas in found.values()]
    assert sum(each.num_draft_tokens for each in last) == proposer.num_verified
    if kind == "oracle" and "rows" not in case:
        assert stats.num_steps < engine_steps(case) / 2


@functools.cache
def engine_steps(case: str) -> int:
    given, weights, params = CASES[case]
    engine = engine_of(model_of("llama", weights), given)
    answers(engine, requests_of(params))
    return engine.stats().num_steps


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("case", DISTURBED)
def test_drafts_change_nothing_where_blocks_run_out(case, kind):
    """And preempt nothing: there are as many preemptions as without them, or fewer."""
    rule = stays_always(64) if "deferred" in case else None
    model = model_of("llama", "fp32")
    params = {"logprobs": 1}
    plain_engine = engine_of(model, DISTURBED[case], commit_rule=rule)
    expected = answers(plain_engine, requests_of(params))
    known = {name: ids_of(deltas) for name, deltas in expected.items()}
    proposer = PROPOSERS[kind](known, VOCAB_SIZE)
    engine = engine_of(model, DISTURBED[case], proposer, commit_rule=rule)
    found = answers(engine, requests_of(params))
    for name, deltas in expected.items():
        assert ids_of(found[name]) == known[name]
        assert [d.logprobs for d in found[name]] == [d.logprobs for d in deltas]
        assert found[name][-1].finish_reason == deltas[-1].finish_reason
    is_timed = "host" in case or "ahead" in case  # loads take their time; ids are read first
    if kind == "adversary" and not is_timed:  # the same steps
        assert engine.stats().num_preemptions == plain_engine.stats().num_preemptions
        assert engine.stats().num_steps == plain_engine.stats().num_steps
    if case == "always deferred":
        assert proposer.num_verified == 0


def test_graphs_take_drafts_as_rows():
    """What would be captured on a GPU is run again as it is; not yet run on a GPU."""
    model, recorder = model_of("llama", "fp32"), Recorder()
    expected = answers(engine_of(model, {}), requests_of({}))
    known = {name: ids_of(deltas) for name, deltas in expected.items()}
    proposer = Mixed(known, VOCAB_SIZE)
    engine = engine_of(model, {"max_num_seqs": 3}, proposer, capture=recorder)
    assert said(answers(engine, requests_of({}))) == said(expected)
    assert proposer.num_accepted and engine.stats().num_graph_steps == recorder.num_replayed > 0


@pytest.mark.parametrize(
    "name", ["qwen3", "mixtral", "mistral-window", "olmoe-clip", "qwen2_moe-window"]
)
def test_other_families(name):
    model = model_of(name, "fp32")
    expected = answers(engine_of(model, {}), requests_of({}, 16))
    known = {name: ids_of(deltas) for name, deltas in expected.items()}
    proposer = Mixed(known, VOCAB_SIZE)
    found = answers(engine_of(model, {}, proposer), requests_of({}, 16))
    assert said(found) == said(expected) and proposer.num_accepted


def test_a_request_can_have_no_drafts():
    model = model_of("llama", "fp32")
    requests = requests_of({"speculate": False})
    expected = answers(engine_of(model, {}), requests)
    proposer = Oracle({name: ids_of(each) for name, each in expected.items()}, VOCAB_SIZE)
    assert said(answers(engine_of(model, {}, proposer), requests)) == said(expected)
    assert proposer.num_verified == 0


def test_a_resumed_answer_and_a_prefix_hit_go_on_alike():
    model = model_of("llama", "fp32")
    requests = requests_of({"logprobs": 1})
    expected = answers(engine_of(model, {}), requests)
    known = {name: ids_of(each) for name, each in expected.items()}
    engine = engine_of(model, {}, Mixed(known, VOCAB_SIZE))
    for cut in (1, 7, 20):
        resumed = [
            dataclasses.replace(r, emitted_ids=tuple(known[r.request_id][:cut])) for r in requests
        ]
        found = answers(engine, resumed)  # the second and third time much is cached
        for name, deltas in found.items():
            assert ids_of(deltas) == known[name][cut:]
            assert [d.logprobs for d in deltas] == [d.logprobs for d in expected[name][cut:]]
    assert engine.stats().num_prefix_hit_tokens > 0


def test_a_nan_after_accepted_drafts_ends_the_request_there():
    """A NaN row fails its request only if accepted tokens lead to it."""
    model = model_of("llama", "fp32")
    request = requests_of(GREEDY)[0]
    known = {"r0": ids_of(answers(engine_of(model, {}), [request])["r0"])}
    for proposer, is_reached in (
        (Oracle(known, VOCAB_SIZE), True),
        (Adversary(known, VOCAB_SIZE), False),
    ):
        engine = engine_of(model, {}, proposer)
        executor: Any = engine.executor
        compute = executor._logits

        def poisoned(hidden, compute=compute):
            logits = compute(hidden)
            if len(logits) > 3:
                logits[3] = torch.nan
            return logits

        executor._logits = poisoned
        engine.add(request)
        found = []
        while engine.has_work():
            found += engine.step()
            engine.check()
        ids = ids_of(found)
        assert ids == known["r0"][: len(ids)]
        assert (found[-1].error == "numerical_error") == is_reached
        if is_reached:
            assert len(ids) == 4, "one token, then two drafts and the token after them"


def test_a_failed_step_is_repeated_without_drafts():
    model = model_of("llama", "fp32")
    requests = requests_of({})
    expected = answers(engine_of(model, {}), requests)
    engine = engine_of(model, {}, Oracle({n: ids_of(d) for n, d in expected.items()}, VOCAB_SIZE))
    launch = engine.executor.launch

    def failing(plan, before=None):
        if plan.num_drafts:
            raise RuntimeError("on purpose")
        return launch(plan, before)

    engine.executor.launch = failing  # type: ignore[method-assign]
    assert said(answers(engine, requests)) == said(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["greedy", "sampled", "penalties", "ends", "sinks", "int8", "chunks"]),
)
def test_no_proposer_and_no_widths_change_an_answer(seed, case):
    given, weights, params = CASES[case]
    expected, _ = plain(case)
    rng = random.Random(seed)
    known = {name: ids_of(deltas) for name, deltas in expected.items()}
    proposer = Mixed(known, VOCAB_SIZE, rng=rng)
    more = {"max_num_seqs": rng.choice((1, 2, 4, 8)), "speculate_tokens": rng.choice((1, 3, 15))}
    engine = engine_of(model_of("llama", weights), {**given, **more}, proposer, Widest(rng))
    assert said(answers(engine, requests_of(params))) == said(expected)
