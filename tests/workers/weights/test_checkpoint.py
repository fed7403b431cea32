"""Damaged and hostile checkpoint files: each is a LoadError that names the spot; none is run."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest

from penstock.workers.errors import LoadError
from penstock.workers.weights.checkpoint import open_checkpoint, read_header
from tests.workers.checkpoints import ALL, make_checkpoint, random_model

SOME_TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "model"))


def rewrite_header(folder: Path, change) -> None:
    """Let `change` edit the header of model.safetensors, which then need not fit its data."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def _shift(header) -> None:
    header[SOME_TENSOR]["data_offsets"][0] += 4
    header[SOME_TENSOR]["data_offsets"][1] += 4


def _widen(header) -> None:
    header[SOME_TENSOR]["shape"][0] += 1


def _retype(header) -> None:
    header[SOME_TENSOR]["dtype"] = "F16"


def _strange_dtype(header) -> None:
    header[SOME_TENSOR]["dtype"] = "F31"


def _negative(header) -> None:
    header[SOME_TENSOR]["shape"][0] *= -1
    header[SOME_TENSOR]["shape"][1] *= -1


def _reversed_offsets(header) -> None:
    header[SOME_TENSOR]["data_offsets"].reverse()


def _overlap(header) -> None:
    header[SOME_TENSOR]["data_offsets"] = [0, 112 * 64 * 4]


class TestDamage:
    @pytest.mark.parametrize(
        "change",
        [_shift, _widen, _retype, _strange_dtype, _negative, _reversed_offsets, _overlap],
    )
    def test_a_header_that_does_not_fit_its_data_names_the_tensor(self, folder: Path, change):
        rewrite_header(folder, change)
        with pytest.raises(LoadError, match=r"model\.safetensors: tensor '.*\.weight'"):
            open_checkpoint(folder)

    def test_a_truncated_file_is_named(self, folder: Path):
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        for size in (len(raw) - 1, len(raw) // 2):
            file.write_bytes(raw[:size])
            with pytest.raises(LoadError, match=r"model\.safetensors: tensor '.*' ends at.*trunc"):
                open_checkpoint(folder)
        for size in (0, 7, 8, 100):
            file.write_bytes(raw[:size])
            with pytest.raises(LoadError, match=r"model\.safetensors"):
                open_checkpoint(folder)
        file.write_bytes(raw + b"\0")
        with pytest.raises(LoadError, match="1 bytes follow"):
            open_checkpoint(folder)

    def test_a_file_that_shrinks_after_the_check_names_the_tensor(self, folder: Path):
        file = folder / "model.safetensors"
        tensors = read_header(file)
        last = max(tensors.values(), key=lambda stored: stored.offset)
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(LoadError, match=last.name):
            last.read()

    @pytest.mark.parametrize("length", [0, 1, 10**8 + 1, 2**63, 2**64 - 1])
    def test_an_absurd_header_length_is_not_believed(self, folder: Path, length: int):
        file = folder / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
        with pytest.raises(LoadError, match=f"a header of {length} bytes"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("text", [b"[1, 2]", b"{", b"\xff\xfe{}", b'{"a":1}', b"[" * 10**5])
    def test_a_header_that_is_no_table_of_tensors(self, folder: Path, text: bytes):
        rewrite_header(folder, lambda header: text)
        with pytest.raises(LoadError, match=r"model\.safetensors"):
            open_checkpoint(folder)

    def test_a_name_that_occurs_twice(self, folder: Path):
        entry = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        rewrite_header(folder, lambda header: b"{" + entry + b"," + entry + b"}")
        with pytest.raises(LoadError, match="twice"):
            open_checkpoint(folder)

    def test_any_flipped_header_byte_is_either_harmless_or_a_load_error(self, folder: Path):
        file = folder / "model.safetensors"
        raw = bytearray(file.read_bytes())
        length = struct.unpack("<Q", raw[:8])[0]
        rng, refused = random.Random(0), 0
        for _ in range(300):
            at, bit = rng.randrange(8 + length), 1 << rng.randrange(8)
            raw[at] ^= bit
            file.write_bytes(raw)
            raw[at] ^= bit
            try:
                read_header(file)
            except LoadError as error:
                refused += str(file) in str(error)
        assert refused > 100

    def test_an_index_must_agree_with_its_shards(self, tmp_path: Path):
        random_model(*ALL["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
        index = tmp_path / "model.safetensors.index.json"
        stated = json.loads(index.read_text())
        shard = stated["weight_map"][SOME_TENSOR]
        (tmp_path / shard).rename(tmp_path / "away")
        with pytest.raises(LoadError, match=shard):
            open_checkpoint(tmp_path)
        (tmp_path / "away").rename(tmp_path / shard)

        for bad in ("../model.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", "", 3):
            weight_map = {**stated["weight_map"], SOME_TENSOR: bad}
            index.write_text(json.dumps({"weight_map": weight_map}))
            with pytest.raises(LoadError, match="is not the name of a safetensors file"):
                open_checkpoint(tmp_path)
        weight_map = {**stated["weight_map"], "model.phantom": shard}
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(LoadError, match=rf"{shard}.*model\.phantom.*missing"):
            open_checkpoint(tmp_path)
        for text in ("{", "[]", "{}", '{"weight_map": 3}'):
            index.write_text(text)
            with pytest.raises(LoadError, match=r"index\.json"):
                open_checkpoint(tmp_path)


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


class TestPickle:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_a_folder_with_nothing_else_is_refused_with_a_remedy(self, folder: Path, name: str):
        marker = folder / "opened"
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
        with pytest.raises(LoadError, match=rf"{name}.*save_pretrained"):
            open_checkpoint(folder)
        assert not marker.exists()
        pickle.loads((folder / name).read_bytes())
        assert marker.exists(), "the bomb must be a live one"

    def test_it_is_not_opened_beside_safetensors_either(self, folder: Path):
        marker = folder / "opened"
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
        open_checkpoint(folder)
        assert not marker.exists()

    def test_an_empty_folder(self, folder: Path):
        (folder / "model.safetensors").unlink()
        with pytest.raises(LoadError, match="holds no safetensors"):
            open_checkpoint(folder)
