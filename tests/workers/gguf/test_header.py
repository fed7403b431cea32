"""Headers of GGUF files: what they say, and any bytes in their place."""

from __future__ import annotations

import asyncio
import itertools
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.gguf import header as header_module
from penstock.workers.gguf import header_reader
from penstock.workers.gguf.header import GgufHeader, find_gguf, headers_kept, read_header
from tests.workers.gguf_files import ARRAY, TEXT, file_of, pair, tensor, text

FUZZ = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
U32, F32, BOOL, U64 = 4, 6, 7, 10
PAIRS = [
    pair("general.architecture", TEXT, text("llama")),
    pair("a.number", U32, struct.pack("<I", 7)),
    pair("a.fraction", F32, struct.pack("<f", 0.5)),
    pair("a.flag", BOOL, b"\1"),
    pair("some.texts", ARRAY, struct.pack("<IQ", TEXT, 2) + text("é") + text("")),
    pair("some.numbers", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
]
TENSORS = [
    tensor("a.weight", (32, 3), 8, 0),  # Q8_0: three blocks of 34 bytes
    tensor("b.weight", (5,), 0, 128),
]
DATA = bytes(128 + 20)
GOOD = file_of(PAIRS, TENSORS, DATA)


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        header = read_header(path)
    except ConfigError as error:
        said = str(error)
    else:
        check_places(header, len(content))
        return
    assert str(path) in said


def check_places(header: GgufHeader, size: int) -> None:
    spans = sorted((each.offset, each.offset + each.num_bytes) for each in header.tensors.values())
    assert all(0 < begin <= end <= size for begin, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans)), "they overlap"


def test_a_header(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    header = read_header(path)
    assert header.metadata == {
        "general.architecture": "llama",
        "a.number": 7,
        "a.fraction": 0.5,
        "a.flag": True,
        "some.texts": ["é", ""],
        "some.numbers": (1, -2, 3),
    }
    a, b = header.tensors["a.weight"], header.tensors["b.weight"]
    assert (a.type.name, a.shape, a.num_bytes) == ("Q8_0", (3, 32), 102)
    assert (b.type.name, b.shape, b.num_bytes) == ("F32", (5,), 20)
    assert b.offset == a.offset + 128 and b.offset + b.num_bytes == len(GOOD)


@FUZZ
@given(st.lists(st.text(max_size=30)), st.integers(1, 64))
def test_strings_that_lie_across_what_is_read_at_once(tmp_path, texts, num_bytes):
    raw = b"".join(map(text, texts))
    listed = pair("some.texts", ARRAY, struct.pack("<IQ", TEXT, len(texts)) + raw)
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of([PAIRS[0], listed, PAIRS[1]], TENSORS, DATA))
    whole = read_header(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(header_reader, "CHUNK_BYTES", num_bytes)
        assert read_header(path) == whole
    assert whole.metadata["some.texts"] == texts and whole.metadata["a.number"] == 7


@pytest.mark.parametrize("num_bytes", [1, 64, header_reader.CHUNK_BYTES])
def test_every_truncation_is_refused(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr(header_reader, "CHUNK_BYTES", num_bytes)
    path = tmp_path / "x.gguf"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(ConfigError, match=r"x\.gguf"):
            read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK" + GOOD, "is not a GGUF file"),
        (file_of(PAIRS, TENSORS, DATA, version=1), "has version 1 of the format"),
        (file_of(PAIRS, TENSORS, DATA, version=3 << 24), "is big-endian"),
        (file_of([*PAIRS, PAIRS[1]], TENSORS, DATA), "'a.number' occurs twice"),
        (file_of(PAIRS, [*TENSORS, TENSORS[1]], DATA), "'b.weight' occurs twice"),
        (file_of(PAIRS, [*TENSORS, tensor("c", (5,), 0, 96)], DATA), "'c' overlap|'c' and"),
        (file_of(PAIRS, [tensor("c", (5,), 0, 8)], DATA), "'c' of 20 bytes .* does not lie"),
        (file_of(PAIRS, [tensor("c", (31, 3), 8, 0)], DATA), "'c' has rows of 31"),
        (file_of(PAIRS, [tensor("c", (256,), 10, 0)], DATA), "'c' is stored as Q2_K"),
        (file_of(PAIRS, [tensor("c", (256,), 999, 0)], DATA), "'c' is stored as type 999"),
        (file_of(PAIRS, [tensor("c", (1,) * 5, 0, 0)], DATA), "'c' has 5 dimensions"),
        (file_of(PAIRS, [tensor("c", (1 << 63, 1 << 63), 0, 0)], DATA), "'c' of .* does not lie"),
        (file_of(PAIRS, [tensor("c", (5,), 0, 1 << 63)], DATA), "'c' of .* does not lie"),
        (file_of([pair("k", 77, b"")], [], DATA), "'k' is of type 77"),
        (file_of([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], DATA), "array of type 9"),
        (
            file_of([pair("k", ARRAY, struct.pack("<IQ", U64, 1 << 60))], [], DATA),
            "length of 'k' is 1152921504606846976",
        ),
        (file_of([pair("k", TEXT, struct.pack("<Q", 1 << 60))], [], DATA), "^.*k has"),
        (
            file_of([pair("k", ARRAY, struct.pack("<IQQ", TEXT, 1, 1 << 60))], [], DATA),
            "k has 1152921504606846976 bytes",
        ),
        (
            file_of(
                [pair("k", ARRAY, struct.pack("<IQ", TEXT, 2) + text("a") + text("b\xff"))],
                [],
                DATA,
            ).replace("b\xff".encode(), b"b\xff\xff"),
            "k is not UTF-8",
        ),
        (
            file_of([pair("general.alignment", U32, struct.pack("<I", 0))], [], DATA),
            "general.alignment is 0",
        ),
        (
            file_of([pair("general.alignment", TEXT, text("32"))], [], DATA),
            "general.alignment is '32'",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "number of metadata pairs"),
        (file_of([pair("k", TEXT, struct.pack("<Q", 1) + b"\xff")], [], DATA), "k is not UTF-8"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@FUZZ
@given(
    at=st.lists(st.integers(0, len(GOOD) - 1), min_size=1, max_size=4),
    values=st.binary(min_size=4, max_size=4),
)
def test_any_changed_bytes(tmp_path, at, values):
    content = bytearray(GOOD)
    for place, value in zip(at, values):
        content[place] = value
    check(tmp_path / "x.gguf", bytes(content))


@FUZZ
@given(
    where=st.integers(0, len(GOOD) - len(DATA) - 8),
    number=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
)
def test_any_number_anywhere(tmp_path, where, number):
    content = GOOD[:where] + struct.pack("<Q", number) + GOOD[where + 8 :]
    check(tmp_path / "x.gguf", content)


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic(tmp_path, content):
    check(tmp_path / "x.gguf", b"GGUF\3\0\0\0" + content)


def test_which_file_is_the_model(tmp_path):
    assert find_gguf(tmp_path) is None
    first = tmp_path / "a.gguf"
    first.write_bytes(GOOD)
    assert find_gguf(first) == first
    assert find_gguf(tmp_path) == first
    (tmp_path / "b.gguf").write_bytes(GOOD)
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a.gguf, b.gguf\); give one"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    other = tmp_path / "notes.txt"
    other.write_text("")
    assert find_gguf(other) is None


def test_a_header_is_read_once_where_it_is_kept(tmp_path, monkeypatch):
    reads = []
    of_file = header_module.read_header_of

    def noted(file, opened):
        reads.append(file)
        return of_file(file, opened)

    monkeypatch.setattr(header_module, "read_header_of", noted)
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for each in (path, other):
        each.write_bytes(GOOD)
    with headers_kept():
        first = read_header(path)
        assert read_header(path) is first and read_header(other).file == other
        assert reads == [path, other]
        path.write_bytes(file_of(PAIRS[:1], TENSORS, DATA))  # another file of the name
        assert "a.number" not in read_header(path).metadata
        assert reads == [path, other, path]
    assert read_header(path) is not read_header(path)
    assert len(reads) == 5


def test_a_task_that_outlives_it_keeps_no_header(tmp_path):
    asyncio.run(outlives(tmp_path))


async def outlives(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    goes_on = asyncio.Event()

    async def later() -> int:
        await goes_on.wait()
        return len(header_module._kept.get() or ())

    with headers_kept():
        read_header(path)
        task = asyncio.ensure_future(later())
        await asyncio.sleep(0)
        in_thread = await asyncio.to_thread(read_header, path)
        assert in_thread is read_header(path)
    goes_on.set()
    assert await task == 0
