"""Tokens and text: the same as transformers makes of a checkpoint, and the same when streamed."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError
from penstock.workers.text.detokenizer import (
    MAX_BYTE_RUN,
    ByteLevelDetokenizer,
    PieceDetokenizer,
    StopChecker,
    WindowDetokenizer,
)
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.workers.text.tokenizers_of import CHATML, KINDS, checkpoint

TEXTS = [
    "",
    " ",
    "The water falls.",
    "  two  spaces, and a tab\t\n\nnew line",
    "naïve café Ångström — “quoted” … 👩‍👩‍👧‍👦 水门 \u0301\u200b",
    "<|im_start|>user\nhello<|im_end|>",
    "NUL \x00 and bell \x07",
]
any_text = st.text(max_size=60)
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=["builtin", "builtin-moe", *KINDS])
def both(request):
    """(ours, transformers') of one checkpoint."""
    name = request.param
    folder = resolve_model(name) if name.startswith("builtin") else checkpoint(name)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_and_decode_equal_transformers(both, add_special_tokens):
    ours, theirs = both
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def test_the_prefix_is_what_stands_before_a_text(both):
    """Not what some tokenizers put behind it."""
    ours, theirs = both
    for text in ("The water falls.", "x"):
        plain = theirs.encode(text, add_special_tokens=False)
        whole = theirs.encode(text)
        assert whole[: len(ours.prefix_ids) + len(plain)] == ours.prefix_ids + plain


def test_a_token_behind_a_text_is_no_prefix(tmp_path):
    folder = shutil.copytree(resolve_model("builtin"), tmp_path / "model")
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    special = stored["added_tokens"]
    first, last = special[0], special[1]
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": first["content"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": last["content"], "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            each["content"]: {
                "id": each["content"], "ids": [each["id"]], "tokens": [each["content"]]
            }
            for each in (first, last)
        },
    }  # fmt: skip
    path.write_text(json.dumps(stored))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("water")[-1] == last["id"]
    assert tokenizer.prefix_ids == [first["id"]]


def test_special_tokens_equal_transformers(both):
    ours, theirs = both
    assert ours.bos_token_id == theirs.bos_token_id
    for name, token in ours.special_tokens.items():
        assert getattr(theirs, name) == token


def test_eos_ids_come_from_generation_config_first(tmp_path):
    shutil.copytree(checkpoint("byte_level"), tmp_path, dirs_exist_ok=True)
    assert Tokenizer.load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert Tokenizer.load(tmp_path).eos_token_ids == (3, 4)


def test_tokens_that_only_the_config_declares(tmp_path):
    shutil.copytree(checkpoint("byte_level"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["extra_special_tokens"] += ["<|tool|>", "<|turn|>"]
    path.write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "<|turn|>a<|tool|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == "a"


def test_without_tokenizer_json_transformers_is_used(tmp_path):
    """GPT-2 style files: vocab.json and merges.txt."""
    model = json.loads((checkpoint("byte_level") / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode("The water")) == "The water"


def test_broken_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.load(tmp_path / "empty")


def test_text_needs_neither_torch_nor_transformers():
    program = (
        "import sys; from penstock.workers.text.tokenizer import Tokenizer;"
        f"Tokenizer.load({str(checkpoint('byte_level'))!r}).encode('a');"
        "sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_token_spells_more_bytes(name):
    ours = Tokenizer.load(checkpoint(name))
    for text in TEXTS:
        num_ids = len(ours.encode(text, add_special_tokens=False))
        assert len(text.encode()) <= num_ids * ours.max_token_bytes


# Detokenizing


def stream(tokenizer: Tokenizer, ids: list[int], groups: list[int], skip: bool) -> list[str]:
    """The pieces of text that come when `ids` come in groups of these sizes, over and over."""
    detokenizer, pieces, at, turn = tokenizer.detokenizer(skip_special_tokens=skip), [], 0, 0
    while at < len(ids):
        size = groups[turn % len(groups)]
        pieces.append(detokenizer.feed(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.finish()]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


def test_each_kind_has_its_detokenizer():
    expected = {
        "byte_level": ByteLevelDetokenizer,
        "byte_fallback": PieceDetokenizer,
        "metaspace": PieceDetokenizer,
        "word_piece": WindowDetokenizer,
    }
    for kind in KINDS:
        assert type(Tokenizer.load(checkpoint(kind)).detokenizer()) is expected[kind]


@functools.cache
def _load(kind: str) -> Tokenizer:
    return Tokenizer.load(checkpoint(kind))


@settings(max_examples=150, deadline=None)
@given(text=any_text, groups=cuts, skip=st.booleans())
def test_streamed_text_is_the_whole_text(kind, text, groups, skip):
    tokenizer = _load(kind)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, groups, skip)) == whole
    assert "".join(stream(tokenizer, ids, [1], skip)) == whole


@settings(max_examples=250, deadline=None)
@given(data=st.data(), groups=cuts, skip=st.booleans())
def test_streamed_random_ids_are_the_whole_text(kind, data, groups, skip):
    tokenizer = _load(kind)
    num_ids = 256 + 3 if kind == "byte_fallback" else 300  # mostly bytes; and past the vocabulary
    ids = data.draw(st.lists(st.integers(0, num_ids + 20), max_size=MAX_BYTE_RUN - 1))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, groups, skip)) == whole


@settings(max_examples=100, deadline=None)
@given(text=any_text)
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    """Also of pieces of characters; where a text begins a decoder may drop the space."""
    for name in ("byte_level", "byte_fallback", "metaspace"):
        tokenizer = _load(name)
        ids = tokenizer.encode(text, add_special_tokens=False)
        spelt = b"".join(map(tokenizer.token_bytes, ids))
        decoded = tokenizer.decode(ids).encode()
        assert spelt in (decoded, b" " + decoded), name


def test_the_bytes_of_single_tokens(both):
    ours, theirs = both
    for token in theirs.all_special_tokens:
        assert ours.token_bytes(theirs.convert_tokens_to_ids(token)) == token.encode()
    assert ours.token_bytes(10**6) == b""
    for token_id in range(0, len(theirs), 7):
        alone = ours.decode([token_id])
        spelt = ours.token_bytes(token_id).decode(errors="replace")
        assert spelt in (alone, f" {alone}"), token_id


def test_builtin_streams_every_unicode_plane():
    tokenizer = Tokenizer.load(resolve_model("builtin"))
    text = "".join(chr(c) for c in range(32, 0x30000, 331) if not 0xD800 <= c < 0xE000)
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids, [1], False)) == tokenizer.decode(ids)


def test_what_continues_a_text_keeps_its_space(kind):
    tokenizer = _load(kind)
    prompt, answer = "the water", " feeds the water"
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(prompt + answer, add_special_tokens=False)
    assert ids[: len(prompt_ids)] == prompt_ids
    detokenizer = tokenizer.detokenizer(after=prompt_ids)
    text = detokenizer.feed(ids[len(prompt_ids) :]) + detokenizer.finish()
    assert prompt + text == tokenizer.decode(ids) == prompt + answer


def test_an_unfinished_character_waits():
    tokenizer = Tokenizer.load(checkpoint("byte_level"))
    ids = tokenizer.encode("a👩b")
    pieces = stream(tokenizer, ids, [1], True)
    assert pieces[0] == "a"
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[len(ids) - 2] == "👩"
    cut = stream(tokenizer, ids[:3], [1], True)
    assert cut[-1] == "\ufffd" == tokenizer.decode(ids[:3])[-1]


def test_a_long_run_of_byte_tokens_streams():
    """A script that the vocabulary lacks must not wait for the end of the answer."""
    tokenizer = Tokenizer.load(checkpoint("byte_fallback"))
    text = "ሰላም ለዓለም፣ " * 20
    ids = tokenizer.encode(text.replace(" ", ""), add_special_tokens=False)
    pieces = stream(tokenizer, ids, [1], True)
    assert "".join(pieces) == text.replace(" ", "")
    first = next(i for i, piece in enumerate(pieces) if piece)
    assert first <= MAX_BYTE_RUN + 1
    assert all(pieces[i] or pieces[i + 1] or pieces[i + 2] for i in range(first, len(ids) - 2))


def test_cost_per_token_is_bounded():
    """A window must not grow with the answer: no decode call ever sees many ids."""
    longest = 0
    tokenizer = Tokenizer.load(checkpoint("word_piece"))

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    detokenizer = WindowDetokenizer(decode, lambda token_id: str(token_id))
    for _ in range(50):
        detokenizer.feed(tokenizer.encode("the water falls 水"))
    assert longest <= 16


# Stop strings


def cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Generate all, look at every end in turn, cut before the stop that is complete first."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


few_letters = st.text("ab\n", max_size=30)


@settings(max_examples=500, deadline=None)
@given(
    text=few_letters,
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4),
    groups=cuts,
)
def test_stop_strings_never_leak(text, stops, groups):
    expected, expected_stop = cut_naively(text, stops)
    checker, given_out, at, turn, stopped = StopChecker(stops), "", 0, 0, None
    while at < len(text) and stopped is None:
        size = groups[turn % len(groups)]
        safe, stopped = checker.feed(text[at : at + size])
        given_out += safe
        assert expected.startswith(given_out), "a part of a stop string got out"
        at, turn = at + size, turn + 1
    if stopped is None:
        # All but a possible beginning of a stop string is out already.
        assert any(stop.startswith(text[len(given_out) :]) for stop in stops)
        given_out += checker.finish()
    assert (given_out, stopped) == (expected, expected_stop)


def test_stop_checker_without_stops_holds_nothing():
    checker = StopChecker(())
    assert checker.feed("abc") == ("abc", None)
    assert checker.finish() == ""


# Chat templates

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Wie geht's?\n  ", "name": None},
    {"role": "assistant", "content": "Gut.", "reasoning": "polite"},
    {"role": "user", "content": "水 👩‍👩‍👧 {{ not.a.template }}"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "chatml": CHATML,
    "system and loop variables": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}\n"
        "  {% set system = messages[0].content | trim %}\n"
        "  {% set messages = messages[1:] %}\n"
        "{% endif %}\n"
        "{%- for m in messages %}\n"
        "    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('roles must alternate') }}\n"
        "    {%- endif %}\n"
        "    {{- '[' ~ m.role | upper ~ '] ' + (system if loop.first else '') + m.content }}\n"
        "    {%- if loop.last and m.role == 'user' %}{{ ' ' * 3 }}\n"
        "    {%- else %}{{ eos_token }}{% endif %}\n"
        "{%- endfor %}"
    ),
    "namespace, json, break, macro": (
        "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endmacro %}\n"
        "{% set ns = namespace(num=0) %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
        "{% for m in messages %}{% if ns.num >= 3 %}{% break %}{% endif %}\n"
        "{% set ns.num = ns.num + 1 %}{{ turn(m) }}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}{{ range(3) | list }}{{ ns.num ** 2 }}{{ strftime_now('%Y') }}"
    ),
    "reasoning": (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.name is defined }}|"
        "{{ m.get('thinking', '-') }}{% endfor %}{{ tools is none }}{{ documents is defined }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_template_equals_transformers(name, add_generation_prompt, tools):
    folder = checkpoint("byte_fallback", TEMPLATES[name])
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    rendered = ours.render_chat(MESSAGES, **options)
    assert rendered == theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    ids = theirs.apply_chat_template(MESSAGES, return_dict=False, **options)
    assert ours.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.parametrize("content", ["Gut", "e", "Sehr gut, ", "<|im_end|> |"])
@pytest.mark.parametrize("template", [CHATML, CHATML.replace("<|im_end|>", "{{ eos_token }}")])
def test_the_last_message_is_continued_as_by_transformers(template, content):
    folder = checkpoint("byte_fallback", template)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [MESSAGES[1], {"role": "assistant", "content": content}]
    rendered = ours.render_chat(messages, add_generation_prompt=False, continues_last=True)
    assert rendered.endswith(content)
    assert rendered == theirs.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )


def test_a_template_that_changes_the_last_message_refuses_to_continue_it(tmp_path):
    for template in ("{{ messages[-1].content | upper }}", "{{ messages[0].content }}"):
        ours = Tokenizer.load(checkpoint("byte_fallback", template))
        messages = [MESSAGES[0], {"role": "assistant", "content": "Gut"}]
        with pytest.raises(RequestError, match="cannot be continued"):
            ours.render_chat(messages, add_generation_prompt=False, continues_last=True)


def test_builtin_chat_template_equals_transformers():
    for model in ("builtin", "builtin-moe"):
        ours = Tokenizer.load(resolve_model(model))
        theirs = AutoTokenizer.from_pretrained(resolve_model(model))
        rendered = ours.render_chat(MESSAGES)
        assert rendered == theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True
        )


def test_template_places(tmp_path):
    """A file comes before the configuration; of several named ones the default is taken."""
    shutil.copytree(checkpoint("byte_level", None), tmp_path, dirs_exist_ok=True)
    ours = Tokenizer.load(tmp_path)
    assert not ours.has_chat_template
    with pytest.raises(RequestError, match="/v1/completions") as refusal:
        ours.render_chat(MESSAGES)
    assert refusal.value.code == "chat_template_missing"
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    path.write_text(json.dumps({**config, "chat_template": named}))
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "file"


HOSTILE = {
    "nested loops": "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "a huge string": "{{ 'a' * 10**10 }}",
    "a huge list": "{{ ([0] * 10**10) | length }}",
    "a huge number": "{{ 9 ** (9 ** 9) }}",
    "much output": "{% for i in range(99999) %}{{ 'abcdefghijklmnopq' }}{% endfor %}",
    "doubling macro": (
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}"
    ),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "clock taken away": (
        "{% set tick = 1 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}"
    ),
    "escape by class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "escape by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changed input": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an undefined value": "{{ a.b.c }}",
    "a filter on the wrong type": "{{ messages | join(1, 2, 3) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_are_bounded(name, tmp_path):
    shutil.copytree(checkpoint("byte_level"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(HOSTILE[name])
    with pytest.raises(RequestError) as refusal:
        Tokenizer.load(tmp_path).render_chat(MESSAGES)
    assert refusal.value.code == "chat_template_error"
    assert "site-packages" not in refusal.value.message


def test_a_refusal_by_the_template_reaches_the_client(tmp_path):
    shutil.copytree(checkpoint("byte_level"), tmp_path, dirs_exist_ok=True)
    template = "{{ raise_exception('only users may speak' + 'x' * 900) }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="only users may speak") as refusal:
        Tokenizer.load(tmp_path).render_chat(MESSAGES)
    assert len(refusal.value.message) < 400


def test_a_template_that_is_no_jinja_stops_the_start(tmp_path):
    shutil.copytree(checkpoint("byte_level"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer.load(tmp_path)


def test_paths_may_be_text():
    assert Tokenizer.load(str(Path(checkpoint("byte_level")))).encode("a")
