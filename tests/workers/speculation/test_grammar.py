"""Grammars under drafts: each row has the mask of its own history, and forced text is drafted.

The oracle is the engine without drafts. The model is the built-in one: grammars need its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.request import Delta, Request, SamplingParams
from penstock.workers.structured.grammar import GrammarCompiler
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, choice
from tests.workers.answers import ids_of
from tests.workers.builtin_grammars import model, open_compiler, tokenizer
from tests.workers.speculation.proposers import Adversary, Mixed, Oracle, Widest

SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": '
    '{"type": "integer"}, "is_keeper": {"type": "boolean"}}, "required": ["name", "age", '
    '"is_keeper"], "additionalProperties": false}'
)
SPECS = {
    "schema": StructuredSpec(StructuredKind.JSON_SCHEMA, SCHEMA),
    "object": StructuredSpec(StructuredKind.JSON_OBJECT),
    "regex": StructuredSpec(StructuredKind.REGEX, r"[a-c]{3,9}-(yes|no)"),
    "choice": choice(["the river", "the dam", "the gate"], param="guided_choice"),
    "grammar": StructuredSpec(StructuredKind.GRAMMAR, 'start: "ab" ("c" | start) "d"'),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with open_compiler() as made:
        yield made


def ask(
    compiler: GrammarCompiler, params: list[SamplingParams], speculation: Any = None
) -> tuple[dict[str, list[Delta]], Engine]:
    speculate: Any = "off" if speculation is None else "lookup"
    config = EngineConfig(num_blocks=512, max_num_seqs=16, speculate=speculate)
    engine = Engine(config, model(), speculation=speculation)
    prompt = tuple(tokenizer().encode("The old man said:"))
    found: dict[str, list[Delta]] = {}
    for i, each in enumerate(params):
        assert each.structured is not None
        engine.add(Request(str(i), prompt, each), compiler.matcher(each.structured))
        found[str(i)] = []
    while engine.has_work():
        for delta in engine.step():
            found[delta.request_id].append(delta)
        engine.check()
    return found, engine


def comparable(found: dict[str, list[Delta]]) -> dict[str, list[Any]]:
    return {
        name: [(d.token_ids, d.logprobs, d.finish_reason, d.stop_token_id, d.error) for d in deltas]
        for name, deltas in found.items()
    }


@pytest.mark.parametrize("kind", [Oracle, Adversary, Mixed])
@pytest.mark.parametrize("name", SPECS)
def test_a_grammar_allows_the_same_tokens(compiler, name, kind):
    more: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"min_tokens": 5, "ignore_eos": True, "logprobs": 1},
    ]
    wanted = [
        SamplingParams(**{"structured": SPECS[name], "seed": seed, "max_tokens": 40, **each})
        for seed, each in enumerate(more)
    ]
    expected, _ = ask(compiler, wanted)
    known = {i: ids_of(deltas) for i, deltas in expected.items()}
    proposer = kind(known, model().config.vocab_size)
    found, engine = ask(compiler, wanted, (proposer, Widest()))
    assert comparable(found) == comparable(expected)
    accepted = engine.stats().num_accepted_tokens
    if name == "schema":
        assert accepted["grammar"] > 0, "forced text was not drafted"
    if kind is Oracle and name == "object":
        assert accepted["suffix"] > 0


def test_drafts_that_a_grammar_forbids_are_cut(compiler):
    matcher = compiler.matcher(SPECS["choice"])
    ids = tokenizer().encode("the dam", add_special_tokens=False)
    wrong = tokenizer().encode("zz", add_special_tokens=False)
    before = matcher._matcher.compute_bitmask()
    # The last token completes the choice: nothing could be sampled after it.
    assert matcher.leading(tuple(ids)) == len(ids) - 1
    assert matcher.leading(tuple(wrong)) == 0
    assert matcher.leading((*ids[:1], *wrong)) == 1
    assert matcher.leading((*ids[:1], matcher.eos_token_ids[0])) == 1
    matcher._consume_drafts(())
    assert matcher._matcher.compute_bitmask() == before
    for token_id in ids:
        assert not matcher.is_complete
        matcher.leading(tuple(ids))  # consumed for a look, and taken back
        matcher.advance(token_id)
    assert matcher.is_complete and not matcher.has_failed
