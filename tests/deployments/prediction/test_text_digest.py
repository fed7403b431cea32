"""Digests of prompts, and what the residual learns of them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.prediction.residual import MAX_SHIFT, LengthResidual, words_in
from penstock.deployments.prediction.text_digest import FACTS, digest_ids, digest_text


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=300))
def test_any_text_has_a_digest(text):
    digest = digest_text(text)
    assert digest.facts is not None and len(digest.facts) == len(FACTS)
    assert all(math.isfinite(fact) for fact in digest.facts)
    hashes = digest.hashes()
    assert len(hashes) == len(set(hashes.tolist())) and digest == digest_text(text)


def test_digest_is_the_same_on_every_machine():
    """Snapshots outlive processes: no hash may depend on one (Python's own str hash does)."""
    hashes = digest_text("Hi").hashes().tolist()
    assert 0xD8932AAC in hashes  # the CRC-32 of "hi"
    assert len(hashes) == 5  # the word, three beginnings, one end


def facts_of(text: str) -> dict[str, float]:
    facts = digest_text(text).facts
    assert facts is not None
    return dict(zip(FACTS, facts, strict=True))


def test_facts_read_the_text():
    facts = facts_of("Write a story of 300 words:\n```x``` ?\n")
    assert facts["asks_count"] == 1 and facts["log_asked_count"] == math.log1p(300)
    assert facts["opens_make"] and facts["asks_long"] and facts["code_fence"]
    assert facts["ends_with_question"] and not facts["opens_how"]
    assert facts["log_newlines"] == math.log1p(2)
    assert facts_of("日本語")["non_ascii_share"] == 1.0


def test_long_prompts_cost_no_more():
    middle = digest_text("start here " * 700 + "other words " * 100_000 + "the end now " * 700)
    again = digest_text("start here " * 700 + "different " * 100_000 + "the end now " * 700)
    assert middle.keys == again.keys  # only the two ends are read
    assert len(middle.keys) < 2000
    assert len(digest_ids(range(1_000_000), "a").keys) < 4 * 260


def test_token_ids_belong_to_their_tokenizer():
    one, other = digest_ids([5, 6, 7], "llama"), digest_ids([5, 6, 7], "qwen")
    assert one.facts is None and not set(one.hashes().tolist()) & set(other.hashes().tolist())


def rows(residual, words, facts=None):
    facts = np.full(2, np.nan) if facts is None else facts
    return residual.rows([words_in(digest_text(words).hashes(), facts)])[0]


def test_residual_starts_silent_and_learns_a_word():
    residual = LengthResidual(2)
    assert residual.shift(rows(residual, "tell me a story")) == 0.0
    for _ in range(100):
        for text, gradient in [("a long story please", 0.5), ("yes or no please", -0.5)]:
            residual.learn(rows(residual, text), gradient)
    assert (
        residual.shift(rows(residual, "one more story"))
        < 0
        < residual.shift(rows(residual, "answer yes"))
    )
    for _ in range(3000):
        residual.learn(rows(residual, "a long story please"), 5.0)
    assert residual.shift(rows(residual, "a long story please")) == -MAX_SHIFT


def test_facts_are_standardised_and_unknown_ones_are_silent():
    residual = LengthResidual(2)
    rng = np.random.default_rng(0)
    seen = rng.normal(1000.0, 50.0, 500)
    for value in seen:
        residual.learn(rows(residual, "", np.array([value, np.nan])), 0.0)
    row = rows(residual, "", np.array([seen.mean() + seen.std(), 7.0]))
    assert abs(row.dense[0] - 1.0) < 1e-3 and row.dense[1] == 0.0
    assert rows(residual, "", np.array([1e9, np.nan])).dense.tolist() == [4.0, 0.0]
