"""Any bytes as a checkpoint's files: its tensors, or a LoadError that names the file."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.checkpoint import INDEX_NAME, open_checkpoint, read_header
from tests.fuzzing import JSON, near
from tests.workers.checkpoints import make_checkpoint

FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I8", "shape": [], "data_offsets": [24, 25]},
    "c": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [25, 25]},
}
DATA = bytes(25)


def file_of(header: Any, data: bytes = DATA) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except LoadError as error:
        assert str(path) in str(error)
        return
    spans = sorted((each.offset, each.offset + each.num_bytes) for each in tensors.values())
    assert all(0 < begin <= end <= len(content) for begin, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans)), "they overlap"


def test_the_header_that_is_changed_is_good_itself(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(HEADER))
    assert read_header(path).keys() == {"a", "b", "c"}


@FUZZ
@given(header=near(HEADER, ("dtype", "shape", "data_offsets")) | JSON, data=st.binary(max_size=40))
def test_any_header(tmp_path, header, data):
    check(tmp_path / "x.safetensors", file_of(header, DATA))
    check(tmp_path / "x.safetensors", file_of(header, data))


@FUZZ
@given(data=st.data())
def test_any_damage(tmp_path, data):
    content = bytearray(file_of(HEADER))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    check(tmp_path / "x.safetensors", bytes(content))


@FUZZ
@given(content=st.binary(max_size=100))
def test_any_bytes(tmp_path, content):
    check(tmp_path / "x.safetensors", content)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000], ids=len)
def test_deep_and_long_headers(tmp_path, text):
    check(tmp_path / "x.safetensors", struct.pack("<Q", len(text)) + text.encode())


@FUZZ
@given(index=near({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}, ("c",)) | JSON)
def test_any_index(tmp_path, index):
    (tmp_path / "x.safetensors").write_bytes(file_of(HEADER))
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    try:
        assert open_checkpoint(tmp_path).keys() <= {"a", "b", "c"}
    except LoadError as error:
        assert str(tmp_path) in str(error)


@FUZZ
@given(data=st.data())
def test_any_config(tmp_path, data):
    config = json.loads((make_checkpoint("llama") / "config.json").read_text())
    changed = data.draw(near(config))
    (tmp_path / "config.json").write_text(json.dumps(changed))
    try:
        assert ModelConfig.from_pretrained(tmp_path).num_layers >= 1
    except ConfigError as error:
        assert str(error)
