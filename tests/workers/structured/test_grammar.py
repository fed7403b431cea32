"""Structured output on the built-in model. Oracles: json, jsonschema, re, and the engine alone.

The books that the model was trained on hold no JSON; whatever is well formed here the grammar made.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.request import FinishReason, Request, RequestError, SamplingParams
from penstock.workers.structured.grammar import NUM_HELPERS, GrammarCompiler
from penstock.workers.structured.sandbox import Helper, HelperFailed
from penstock.workers.structured_spec import (
    MAX_CHOICES,
    StructuredKind,
    StructuredSpec,
    choice,
    json_schema,
)
from tests.workers.builtin_grammars import model, open_compiler, tokenizer

PROMPT = "The old man said:"
ARITHMETIC = """start: term (" + " term)*
term: /[0-9]{1,3}/ | "(" start ")"
"""


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with open_compiler() as made:
        yield made


def new_engine(**settings: Any) -> Engine:
    return Engine(EngineConfig(**{"num_blocks": 512, "max_num_seqs": 16, **settings}), model())


def run(
    engine: Engine, compiler: GrammarCompiler, wanted: Sequence[SamplingParams]
) -> list[tuple[list[int], FinishReason | None, str | None]]:
    """Ids, finish reason and error of each, all side by side."""
    prompt = tuple(tokenizer().encode(PROMPT))
    answers: list[Any] = [([], None, None) for _ in wanted]
    for i, params in enumerate(wanted):
        spec = params.structured
        matcher = None if spec is None else compiler.matcher(spec)
        engine.add(Request(str(i), prompt, params), matcher)
    while engine.has_work():
        for delta in engine.step():
            ids, _, _ = answers[int(delta.request_id)]
            rendered = [id for id in delta.token_ids if id != delta.stop_token_id]
            answers[int(delta.request_id)] = (ids + rendered, delta.finish_reason, delta.error)
        engine.check()
    return answers


def text(ids: Sequence[int]) -> str:
    return tokenizer().decode(ids)


def any_json_object(seed: int, **more: Any) -> SamplingParams:
    spec = StructuredSpec(StructuredKind.JSON_OBJECT)
    return SamplingParams(seed=seed, structured=spec, **more)


def fits(spec: StructuredSpec, answer: str) -> bool:
    match spec.kind:
        case StructuredKind.JSON_OBJECT:
            return isinstance(json.loads(answer), dict)
        case StructuredKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(answer), json.loads(spec.text))
            return True
        case StructuredKind.REGEX:
            return re.fullmatch(spec.text, answer) is not None
        case StructuredKind.CHOICE:
            return answer in json.loads(spec.text)
        case StructuredKind.GRAMMAR:
            return re.fullmatch(r"[0-9+ ()]+", answer) is not None and eval_sum(answer)


def eval_sum(answer: str) -> bool:
    """Whether `answer` is a sum of numbers in brackets: reduce it, innermost first."""
    while True:
        reduced = re.sub(r"\(\d{1,3}(?: \+ \d{1,3})*\)", "1", answer)
        if reduced == answer:
            return re.fullmatch(r"\d{1,3}(?: \+ \d{1,3})*", answer) is not None
        answer = reduced


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = rng.choice(kinds) if depth else "object"
    match kind:
        case "string":
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)}
        case "pattern":
            pattern = rng.choice(["^[a-z]{1,6}$", "^\\d{4}-\\d{2}$", "^(ab|c)*$"])
            return {"type": "string", "pattern": pattern, "maxLength": 12}
        case "integer" | "number":
            low = rng.randrange(-1000, 1000)
            return {"type": kind, "minimum": low, "maximum": low + rng.randrange(1, 500)}
        case "enum":
            return {"enum": [rng.choice(["é", "x y", 3, None, True, '"']) for _ in range(3)]}
        case "const":
            return {"const": rng.choice(["fixed", 17, False, 'quo"te\\'])}
        case "object":
            names = [rng.choice("abcdefgh") + rng.choice(["", "_1", " é"]) for _ in range(4)]
            properties = {name: random_schema(rng, depth + 1) for name in names[: 1 + depth]}
            required = [name for name in properties if rng.random() < 0.7]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            low = rng.randrange(2)
            items = random_schema(rng, depth + 1)
            high = low + rng.randrange(3)
            return {"type": "array", "items": items, "minItems": low, "maxItems": high}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case other:
            return {"type": other}


def test_answers_to_random_schemas_validate(compiler: GrammarCompiler) -> None:
    num = int(os.environ.get("PENSTOCK_RANDOM_SCHEMAS", "100"))
    rng = random.Random(7)
    for _ in range(0, num, 16):
        specs = [
            json_schema(random_schema(rng), param="response_format") for _ in range(min(16, num))
        ]
        wanted = [
            SamplingParams(seed=rng.randrange(1000), max_tokens=300, structured=spec)
            for spec in specs
        ]
        for spec, (ids, reason, _) in zip(specs, run(new_engine(), compiler, wanted)):
            assert reason in (FinishReason.STOP, FinishReason.LENGTH), spec.text
            if reason is FinishReason.STOP:
                assert fits(spec, text(ids)), spec.text
            else:
                assert len(ids) == 300


SHAPES = [
    StructuredSpec(StructuredKind.REGEX, r"[A-Z][a-z]{2,5} \d{1,2}"),
    StructuredSpec(StructuredKind.REGEX, r"(é|日本){2,3}"),
    choice(['say "no"', "back\\slash", "日本", "two\nlines", "yes", "yes!"], param="c"),
    StructuredSpec(StructuredKind.GRAMMAR, ARITHMETIC),
    StructuredSpec(StructuredKind.GRAMMAR, 'root ::= [0-9] ("+" [0-9] " ")? "0"?'),
]


@pytest.mark.parametrize("spec", SHAPES, ids=lambda spec: f"{spec.kind}-{spec.text[:12]!r}")
def test_each_kind_keeps_its_shape(compiler: GrammarCompiler, spec: StructuredSpec) -> None:
    to_end = tuple((id, 5.0) for id in model().config.eos_token_ids)  # or it opens brackets on
    wanted = [
        SamplingParams(seed=i, max_tokens=120, structured=spec, logit_bias=to_end) for i in range(8)
    ]
    answers = run(new_engine(), compiler, wanted)
    stopped = [text(ids) for ids, reason, _ in answers if reason is FinishReason.STOP]
    assert stopped, "none ended by itself"
    for answer in stopped:
        if "root" in spec.text:
            assert re.fullmatch(r"\d(\+\d )?0?", answer), answer
        else:
            assert fits(spec, answer), answer


def test_every_token_is_one_that_the_grammar_lets_through(compiler: GrammarCompiler) -> None:
    """Replayed through a fresh matcher; a token out of place makes it fail."""
    [(ids, _, _)] = run(new_engine(), compiler, [any_json_object(3, max_tokens=80)])
    spec = StructuredSpec(StructuredKind.JSON_OBJECT)
    assert not compiler.matcher(spec, ids).has_failed
    with pytest.raises(RequestError, match="do not fit") as refused:
        compiler.matcher(spec, [*ids[:1], *tokenizer().encode("}}")])
    assert refused.value.param == "emitted_ids"


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_json_has_no_more_white_space_than_sets_it_out(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec(StructuredKind.JSON_OBJECT)
    for text in ('{"a": 1}', '{"a" :\t[ 1 , 2 ]}', '{\r\n\t\t"a":\n        {\n"b": 1}}'):
        assert not compiler.matcher(spec, encode(text)).has_failed
    for text in ('{\n\n"a": 1}', '{   "a": 1}', '{"a":\n' + 33 * " " + "1}"):
        with pytest.raises(RequestError, match="do not fit"):
            compiler.matcher(spec, encode(text))


def test_end_of_sequence_only_where_the_grammar_accepts(compiler: GrammarCompiler) -> None:
    """The end is made the likeliest token by far, and yet comes only after whole answers."""
    bias = tuple((id, 100.0) for id in model().config.eos_token_ids)
    spec = StructuredSpec(StructuredKind.REGEX, r"\d{3}(,\d{3})*")
    params = SamplingParams(temperature=0.0, max_tokens=50, logit_bias=bias, structured=spec)
    [(ids, reason, _)] = run(new_engine(), compiler, [params])
    assert reason is FinishReason.STOP
    assert re.fullmatch(r"\d{3}", text(ids))


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"\d", "3", "\u0663"),  # an Arabic digit
        (r"[x\d]", "3", "\u0663"),
        (r"[^\D]", "3", "\u0663"),
        (r"\w", "a", "\u00e9"),
        (r"\W", "\u00e9", "a"),
        (r"\p{L}", "\u00e9", "3"),
        (r"\\d", "\\d", "3"),
    ],
)
def test_classes_are_ascii_in_a_regex_as_in_a_pattern(
    compiler: GrammarCompiler, pattern: str, fits: str, does_not: str
) -> None:
    spec = regex(pattern)
    assert compiler.matcher(spec, encode(fits)).is_accepting
    with pytest.raises(RequestError, match="do not fit"):
        compiler.matcher(spec, encode(does_not))


def test_few_tokens_end_with_length(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec(StructuredKind.REGEX, "abcdefghijklmnopqrstuvwxyz" * 4)
    wanted = [SamplingParams(max_tokens=n, structured=spec) for n in (1, 2, 3)]
    for n, (ids, reason, _) in zip((1, 2, 3), run(new_engine(), compiler, wanted)):
        assert reason is FinishReason.LENGTH and len(ids) == n
        assert spec.text.startswith(text(ids))


def test_neighbours_get_the_same_ids(compiler: GrammarCompiler) -> None:
    free = [SamplingParams(seed=i, max_tokens=40) for i in range(6)]
    shaped = [any_json_object(i, max_tokens=40) for i in range(6)]
    alone = [run(new_engine(), compiler, [params])[0] for params in free + shaped]
    mixed = [params for pair in zip(free, shaped) for params in pair]
    together = run(new_engine(max_num_batched_tokens=24), compiler, mixed)
    assert together[0::2] == alone[:6]
    assert together[1::2] == alone[6:]


def test_preemption_changes_nothing(compiler: GrammarCompiler) -> None:
    wanted = [any_json_object(i, max_tokens=60) for i in range(6)]
    expected = run(new_engine(), compiler, wanted)
    tight = new_engine(num_blocks=12, block_size=8, prefix_cache=False)
    assert run(tight, compiler, wanted) == expected
    assert tight.stats().num_preemptions > 0, "nothing was preempted"


def test_a_matcher_continues_after_emitted_tokens(compiler: GrammarCompiler) -> None:
    params = any_json_object(5, max_tokens=60)
    [(ids, reason, _)] = run(new_engine(), compiler, [params])
    engine = new_engine()
    spec, head = params.structured, tuple(ids[:10])
    assert spec is not None
    prompt = tuple(tokenizer().encode(PROMPT))
    engine.add(Request("r", prompt, params, emitted_ids=head), compiler.matcher(spec, head))
    rest: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            rest += [id for id in delta.token_ids if id != delta.stop_token_id]
            last = delta.finish_reason
    assert (list(head) + rest, last) == (ids, reason)


@pytest.mark.parametrize(
    "wishes",
    [
        {"min_tokens": 40},
        {"ignore_eos": True},
        {"bad_words_ids": "all"},
        {"allowed_token_ids": (5, 6)},
        {"min_tokens": 40, "ignore_eos": True, "bad_words_ids": "all"},
        {"temperature": 0.0, "top_k": 1, "min_p": 1.0},
    ],
    ids=str,
)
def test_the_grammar_takes_precedence_over_other_parameters(
    compiler: GrammarCompiler, wishes: dict[str, Any]
) -> None:
    """Nothing is left to choose where they clash, unless one of them gives way."""
    spec = choice(["abracadabra"], param="c")
    if wishes.get("bad_words_ids") == "all":
        words = tuple((id,) for id in tokenizer().encode("abracadabraabcad"))
        wishes = {**wishes, "bad_words_ids": words}
    params = SamplingParams(max_tokens=50, structured=spec, **wishes)
    [(ids, reason, error)] = run(new_engine(), compiler, [params])
    assert (text(ids), reason, error) == ("abracadabra", FinishReason.STOP, None)


def test_other_parameters_apply_where_the_grammar_leaves_a_choice(
    compiler: GrammarCompiler,
) -> None:
    spec = choice(["yes", "no"], param="c")
    for word, other in (("yes", "no"), ("no", "yes")):
        ids = range(model().config.vocab_size)
        begins = [id for id in ids if text([id]) and word.startswith(text([id]))]
        banned = tuple((id,) for id in begins)
        params = SamplingParams(max_tokens=20, bad_words_ids=banned, structured=spec)
        [(answer, _, _)] = run(new_engine(), compiler, [params])
        assert text(answer) == other


def test_min_tokens_holds_the_end_back_while_more_may_come(compiler: GrammarCompiler) -> None:
    spec = StructuredSpec(StructuredKind.REGEX, r"[a-z ]{1,400}")
    bias = tuple((id, 100.0) for id in model().config.eos_token_ids)
    params = SamplingParams(seed=1, max_tokens=60, min_tokens=30, logit_bias=bias, structured=spec)
    [(ids, reason, _)] = run(new_engine(), compiler, [params])
    assert reason is FinishReason.STOP and len(ids) == 30


def test_a_grammar_that_grows_too_complex_ends_alone(compiler: GrammarCompiler) -> None:
    """The library's fuel runs out in the midst of the answer; neighbours notice nothing."""
    hostile = StructuredSpec(StructuredKind.REGEX, r"(.{1,50}){100}", param="structured_outputs")
    free = SamplingParams(seed=1, max_tokens=80)
    alone = run(new_engine(), compiler, [free])
    wanted = [free, SamplingParams(seed=2, max_tokens=80, structured=hostile)]
    together = run(new_engine(), compiler, wanted)
    assert together[:1] == alone
    assert together[1][1:] == (FinishReason.ERROR, "invalid_value")
    # Its twin is not held to account: each has a lexer of its own.
    assert compiler.matcher(hostile).has_failed is False


def test_without_a_compiler_it_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError) as refused:
        new_engine().add(Request("r", (5,), any_json_object(1)))
    assert refused.value.code == "unsupported_parameter"


def schema_text(schema: str) -> StructuredSpec:
    return StructuredSpec(StructuredKind.JSON_SCHEMA, schema, param="p")


def grammar(lark: str) -> StructuredSpec:
    return StructuredSpec(StructuredKind.GRAMMAR, lark, param="p")


def regex(pattern: str) -> StructuredSpec:
    return StructuredSpec(StructuredKind.REGEX, pattern, param="p")


def fan(word: str, depth: int = 30) -> dict[str, Any]:
    rules = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(depth)}
    return {"$defs": {**rules, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


REFUSED = {
    "deep": schema_text('{"a":' * 10_000 + "1" + "}" * 10_000),
    "depth-33": schema_text('{"not":' * 33 + "{}" + "}" * 33),
    "unclosed": schema_text('{"a":' * 30),
    "quotes": schema_text('"\\"' * 20_000),
    "open-string": schema_text('{"' + '\\"' * 30_000),
    "large": schema_text('{"title": "' + "x" * 70_000 + '"}'),
    "large-in-bytes": schema_text('{"title": "' + "é" * 40_000 + '"}'),
    "no-json": schema_text("{'a': 1}"),
    "no-object": schema_text("[]"),
    "surrogate": schema_text('{"title": "\ud800"}'),
    "nul": regex("a\0b"),
    "remote": schema_text('{"$ref": "http://127.0.0.1/schema"}'),
    "file": schema_text('{"$ref": "file:///etc/passwd"}'),
    "unknown-type": schema_text('{"type": "colour"}'),
    "not": schema_text('{"not": {"type": "string"}}'),
    "nothing-fits": schema_text('{"type": "integer", "minimum": 2, "maximum": 1}'),
    "own-options": schema_text('{"x-guidance": {"lenient": true}}'),
    "products": json_schema(
        {"allOf": [{"anyOf": [{"const": j * i} for j in range(4)]} for i in range(30)]}, param="p"
    ),
    "empty-regex": regex(""),
    "nothing": regex(r"[^\s\S]"),
    "look-ahead": regex("(?=a)b"),
    "back-reference": regex(r"(a)\1"),
    "unclosed-class": regex("["),
    "deep-regex": regex("(" * 1000 + "a" + ")" * 1000),
    "large-regex": regex("a" * 9000),
    "costly-regex": regex("(a|b|ab)*" * 500),
    "pattern": schema_text(json.dumps({"type": "string", "pattern": "(" * 40 + ")" * 40})),
    "long-pattern": schema_text(json.dumps({"type": "string", "pattern": "a" * 9000})),
    "no-start": grammar('a: "b"'),
    "deep-grammar": grammar("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "hidden-depth": grammar('start: /"/ ' + "(" * 30_000 + '"a"' + ")" * 30_000),
    "hidden-regex": grammar('start: /"' + "(" * 30_000 + "a" + ")" * 30_000 + "/"),
    "hidden-gbnf": grammar('root ::= [^"] ' + "(" * 30_000 + '"a"' + ")" * 30_000),
    "left-open": grammar("start: start"),
    "no-choice": choice([], param="p"),
    "empty-choice": choice(["a", ""], param="p"),
    "many-choices": choice(["x"] * (MAX_CHOICES + 1), param="p"),
}


@pytest.mark.parametrize("spec", REFUSED.values(), ids=REFUSED.keys())
def test_hostile_grammars_are_refused(compiler: GrammarCompiler, spec: StructuredSpec) -> None:
    with pytest.raises(RequestError) as refused:
        compiler.matcher(spec)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "p")
    assert refused.value.message.startswith("p") and len(refused.value.message) < 400


# Costly for others' compilers: refused, or served within the fuel of each step; never a hang.
BOUNDED = {
    "catastrophic": regex("(a+)+$"),
    "repeats": regex("(.{1,50}){100}"),
    "nested-repeats": regex("((a{1,1000}){1,1000}){1,1000}"),
    "states": regex("(.*a.{200})+"),
    "classes": regex(r"\p{L}" * 1000),
    "many-any": json_schema(fan("anyOf"), param="p"),
    "many-all": json_schema(fan("allOf"), param="p"),
    "items": schema_text('{"type": "array", "minItems": 100000, "maxItems": 100001}'),
    "long": schema_text('{"type": "string", "minLength": 1000000000}'),
    "endless": schema_text('{"$ref": "#"}'),
    "recursive": grammar('start: a\na: a a | "x" | a a a'),
    "wide": json_schema({"enum": [f"value {i}" for i in range(3000)]}, param="p"),
}


@pytest.mark.parametrize("spec", BOUNDED.values(), ids=BOUNDED.keys())
def test_costly_grammars_do_not_affect_other_requests(
    compiler: GrammarCompiler, spec: StructuredSpec
) -> None:
    try:
        compiler.matcher(spec)
    except RequestError:
        return  # how refusals look is tested above
    free = SamplingParams(seed=1, max_tokens=12)
    shaped = SamplingParams(seed=2, max_tokens=12, structured=spec)
    alone = run(new_engine(), compiler, [free])
    together = run(new_engine(), compiler, [free, shaped])
    assert together[:1] == alone
    assert together[1][1] is not None


def test_what_a_schema_cannot_enforce_is_passed_over_if_lenient(compiler: GrammarCompiler) -> None:
    schema = {"type": "integer", "not": {"const": 3}}
    with pytest.raises(RequestError):
        compiler.matcher(json_schema(schema, param="p"))
    compiler.matcher(json_schema(schema, param="p", lenient=True))


def test_a_helper_that_hangs_or_ends_is_replaced() -> None:
    helper = Helper()
    easy = {"kind": "regex", "text": "a", "lenient": False}
    try:
        assert "grammar" in helper.ask(easy)
        first = helper._process
        assert first is not None
        first.send_signal(signal.SIGSTOP)  # as a compiler that never comes back
        while psutil.Process(first.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        limit_s, helper._limit_s = helper._limit_s, 0.1  # 1 s by the clock; questions alone take it
        with pytest.raises(HelperFailed):
            helper.ask(easy)
        helper._limit_s = limit_s
        assert first.poll() is not None, "the process still runs"
        assert "grammar" in helper.ask(easy)
        second = helper._process
        assert second is not None and second.pid != first.pid
        second.kill()
        second.wait()
        with pytest.raises(HelperFailed):
            helper.ask(easy)
        assert "grammar" in helper.ask(easy)
    finally:
        helper.close()


COSTLY = '{"type":"integer","minimum":0,"maximum":%d,"multipleOf":999983}'


def costly(number: int) -> StructuredSpec:
    """A schema that takes more CPU time than the helper has."""
    return json_schema(json.loads(COSTLY % (10**18 - number)), param="p")


def test_what_takes_too_long_is_remembered_as_such(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="too much time or memory") as refusal:
            compiler.matcher(costly(1))
        assert refusal.value.code == "invalid_value"
    with compiler._lock:
        assert costly(1) in compiler._verdicts


def test_a_busy_moment_is_not_held_against_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that stood still had a good schema refused for hours."""
    made = GrammarCompiler(lambda: tokenizer().to_json(), vocab_size=8192, eos_token_ids=(0,))
    helpers = [made._idle.get() for _ in range(NUM_HELPERS)]
    try:
        for helper in helpers:
            helper.ask({"kind": "regex", "text": "a", "lenient": False})
            helper._limit_s = 0.05  # 0.5 s by the clock
            assert helper._process is not None
            helper._process.send_signal(signal.SIGSTOP)
            made._idle.put(helper)
        for _ in range(NUM_HELPERS):
            with pytest.raises(RequestError, match="no time") as refusal:
                made.matcher(regex("b{3}"))
            assert refusal.value.code == "overloaded"
        for helper in helpers:
            helper._limit_s = 1.0
        made.matcher(regex("b{3}"))  # new helpers have started
    finally:
        made.close()


def test_a_helper_that_was_killed_once_is_no_verdict_either() -> None:
    made = GrammarCompiler(lambda: tokenizer().to_json(), vocab_size=8192, eos_token_ids=(0,))
    try:
        made.matcher(regex("c{3}"))
        helpers = [made._idle.get() for _ in range(NUM_HELPERS)]
        for helper in helpers:
            if helper._process is not None:
                helper._process.kill()
            made._idle.put(helper)
        made.matcher(regex("c{4}"))
    finally:
        made.close()


def test_the_helper_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")
    helper = Helper()
    try:
        helper.ask({"kind": "regex", "text": "a", "lenient": False})
        assert helper._process is not None
        environment = Path(f"/proc/{helper._process.pid}/environ").read_bytes()
        assert b"secret" not in environment and b"PATH=" in environment
    finally:
        helper.close()


def test_verdicts_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.structured.grammar.MAX_CACHED", 4)
    made = GrammarCompiler(lambda: tokenizer().to_json(), vocab_size=8192, eos_token_ids=(0,))
    try:
        for i in range(9):
            made.matcher(regex(f"a{{{i + 1}}}"))
        assert len(made._verdicts) == 4
        monkeypatch.setattr("penstock.workers.structured.grammar.MAX_CACHED_BYTES", 2000)
        made.matcher(regex("b" * 400))
        assert made._num_bytes <= 2000 and len(made._verdicts) == 0
        made.matcher(regex("c"))
        assert made._num_bytes == sum(
            4 * (len(spec.text) + sum(map(len, verdict.values())))
            for spec, verdict in made._verdicts.items()
        )
    finally:
        made.close()


@pytest.mark.parametrize("num_nan", [1, None])
def test_bad_numbers_are_not_hidden_by_a_mask(
    compiler: GrammarCompiler, num_nan: int | None
) -> None:
    row = torch.zeros(model().config.vocab_size)
    row[:num_nan] = torch.nan
    compiler.matcher(regex("abc")).constrain(row, None, ())
    assert bool(row.isnan().any())
