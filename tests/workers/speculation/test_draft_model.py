"""Answers with a draft model are those of plain decoding, bit for bit, whatever it proposes.

The oracle is the engine without drafts. A draft model with the model's own weights draws what the
model draws, so all of its drafts are right: that is the oracle of its rows, places and K and V.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request
from penstock.workers.speculation.draft import Draft, Text
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import ALL, random_prompt, randomised
from tests.workers.commit_rules import stays_always
from tests.workers.speculation.draft_steps import AllSteps
from tests.workers.speculation.proposers import Widest
from tests.workers.speculation.test_exact import (
    CASES,
    DISTURBED,
    GREEDY,
    indexed,
    model_of,
    one_salt,
    plain,
    requests_of,
    said,
)

if native.bound.library is None:
    pytest.skip("PyTorch's products have other bits for other sizes", allow_module_level=True)

__all__ = ["one_salt"]
MOST = 5


class Nothing:
    """A proposer without drafts."""

    def propose(self, text: Text, most: int) -> Draft | None:
        return None

    def observe(self, text: Text, draft: Draft, num_accepted: int) -> None:
        raise AssertionError("it has proposed nothing")

    def end(self, text: Text) -> None:
        pass


def engine_of(
    model: Decoder,
    given: dict[str, Any],
    draft: Decoder,
    *,
    is_own: bool,
    rng: random.Random | None = None,
    **more: Any,
) -> Engine:
    """With drafts of `draft`, which has K and V of its own with `is_own`, else reads the model's.
    Fresh memory of the model is all NaN."""
    fixed = {"num_blocks": 512, "block_size": 4, "max_num_seqs": 8, "speculate_tokens": MOST}
    name = "another" if is_own else None
    config = EngineConfig(**{**fixed, "speculate": "draft", "draft_model": name, **given})
    engine = Engine(
        config,
        model,
        speculation=(Nothing(), Widest(rng)),
        draft=draft,
        draft_steps=AllSteps(rng),
        **more,
    )
    engine.arena.storage.fill_(0xFF)
    return engine


def counts(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    assert not any(num for name, num in stats.num_draft_tokens.items() if name != "draft")
    return stats.num_draft_tokens["draft"], stats.num_accepted_tokens["draft"]


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_weights_draft_what_the_model_draws(case, is_own):
    """All drafts are right, greedy or sampled, with penalties and bias; nothing else changes."""
    given, weights, params = CASES[case]
    model = model_of("llama", weights)
    expected, keys = plain(case)
    engine = engine_of(model, given, model, is_own=is_own)
    found = answers(engine, requests_of(params))
    assert said(found) == said(expected)
    assert indexed(engine) == keys
    proposed, accepted = counts(engine)
    # Own K and V of a window are computed without the tokens that have left it.
    is_equal = not (is_own and ("sinks" in case or "KV" in case))
    assert proposed > 0 and (accepted == proposed or not is_equal)
    assert accepted > proposed / (10 if is_own else 3)


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("case", ["greedy", "sampled", "penalties", "sinks", "chunks", "logprobs"])
def test_other_weights_change_no_answer(case, weights, is_own):
    given, own, params = CASES[case]
    expected, keys = plain(case)
    engine = engine_of(model_of("llama", own), given, model_of("llama", weights), is_own=is_own)
    assert said(answers(engine, requests_of(params))) == said(expected)
    assert indexed(engine) == keys
    proposed, accepted = counts(engine)
    assert 0 < accepted < proposed


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("case", DISTURBED)
def test_nothing_changes_where_blocks_run_out(case, is_own):
    """Preempted sequences come back to other blocks, with K and V of a draft model to be redone."""
    rule = stays_always(64) if "deferred" in case else None
    model, params = model_of("llama", "fp32"), {"logprobs": 1}
    config = {"num_blocks": 512, "block_size": 4, "max_num_seqs": 8, **DISTURBED[case]}
    expected = answers(Engine(EngineConfig(**config), model, rule), requests_of(params))
    engine = engine_of(model, DISTURBED[case], model, is_own=is_own, commit_rule=rule)
    found = answers(engine, requests_of(params))
    for name, deltas in expected.items():
        assert ids_of(found[name]) == ids_of(deltas)
        assert [d.logprobs for d in found[name]] == [d.logprobs for d in deltas]
    proposed, accepted = counts(engine)
    if case == "always deferred":
        assert not proposed
    elif "host" not in case:  # whose blocks come back without the draft model's K and V
        assert accepted == proposed > 0


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "mistral-window", "gemma2", "olmoe-clip"])
def test_other_families(name):
    model, requests = model_of(name, "fp32"), requests_of({}, 16)
    expected = answers(
        Engine(EngineConfig(num_blocks=512, block_size=4, max_num_seqs=8), model), requests
    )
    for is_own in (False, True):
        engine = engine_of(model, {}, model, is_own=is_own)
        assert {n: ids_of(d) for n, d in answers(engine, requests).items()} == {
            n: ids_of(d) for n, d in expected.items()
        }
        proposed, accepted = counts(engine)
        assert accepted == proposed > 0


def smaller(tmp_path: Any) -> Decoder:
    """Another model with the same vocabulary: fewer and narrower layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = ALL["llama"]
    values = {**values, "num_hidden_layers": 1, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    randomised(model, seed=3).save_pretrained(tmp_path)
    return load_model(tmp_path, weights="fp32", progress=False)


def test_another_model_changes_no_answer(tmp_path):
    draft = smaller(tmp_path)
    for case in ("greedy", "sampled", "ahead", "ends"):
        given, weights, params = CASES[case]
        engine = engine_of(model_of("llama", weights), given, draft, is_own=True)
        assert said(answers(engine, requests_of(params))) == said(plain(case)[0])
        assert counts(engine)[0] > 0


def test_a_long_prompt_is_caught_up_with_and_a_prefix_is_not_computed_twice():
    """Where few tokens are asked for after a long prompt, the draft model does not begin."""
    model = model_of("llama", "fp32")
    params = requests_of(GREEDY)[0].params
    prompt = tuple(random_prompt(300, seed=1))
    requests = [Request("a", prompt, params), Request("b", (*prompt, 5, 6), params)]
    off = Engine(EngineConfig(num_blocks=512, block_size=4, max_num_seqs=8), model)
    engine = engine_of(model, {}, model, is_own=True)
    drafts = cast(Any, engine.scheduler.drafting).model
    launched: list[int] = []
    compute = drafts.executor.compute

    def counting(step: Any, *more: Any) -> Any:
        launched.append(len(step.batch.token_ids) if not step.rows else 0)
        return compute(step, *more)

    drafts.executor.compute = counting
    for request in requests:
        assert said(answers(engine, [request])) == said(answers(off, [request]))
    assert counts(engine)[0] == counts(engine)[1] > 0
    assert [num for num in launched if num] == [256, 45], "the prefix was computed again"
    few = Request("c", tuple(random_prompt(400, seed=2)), dataclasses.replace(params, max_tokens=9))
    answers(engine, [few])
    assert [num for num in launched if num] == [256, 45]


def test_drafts_leave_no_blocks_behind():
    """With drafts on offer and none taken, a sequence holds the blocks of its own tokens alone."""
    model = model_of("llama", "fp32")

    class NoWidths(Widest):
        def choose(self, offers: Any, step: Any, room: int) -> list[int]:
            return [0] * len(offers)

    engine = engine_of(model, {}, model, is_own=False)
    cast(Any, engine.scheduler.drafting).widths = NoWidths()
    request = requests_of(GREEDY)[1]
    engine.add(request)
    while engine.has_work():
        engine.step()
        for seq in engine.scheduler.running:
            assert len(seq.block_table) <= -(-seq.num_tokens // 4)
        engine.check()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["greedy", "sampled", "penalties", "ends", "sinks", "int8", "chunks"]),
    st.booleans(),
)
def test_no_draft_model_and_no_widths_change_an_answer(seed, case, is_own):
    given, weights, params = CASES[case]
    rng = random.Random(seed)
    more = {"max_num_seqs": rng.choice((1, 2, 4, 8)), "speculate_tokens": rng.choice((1, 3, 15))}
    draft = model_of("llama", rng.choice(("int4", weights)))
    model = model_of("llama", weights)
    engine = engine_of(model, {**given, **more}, draft, is_own=is_own, rng=rng)
    assert said(answers(engine, requests_of(params))) == said(plain(case)[0])
