"""The expert file: its contents, how damage is detected, and the memory that writing it takes."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.workers.errors import LoadError
from penstock.workers.experts.expert_file import CorruptedExpert, ExpertFile, Manifest
from penstock.workers.experts.writer import (
    manifest_path,
    read_manifest,
    remove_expert_file,
    remove_partial_files,
    write_expert_file,
)
from penstock.workers.weights.sources import DTYPES
from tests.workers.checkpoints import make_checkpoint
from tests.workers.experts.moe_cases import experts_of, flip

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "minimax_m2")


@functools.cache
def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return load_file(make_checkpoint(name) / "model.safetensors")


def typed(expert_file: ExpertFile, layer: int, expert: int) -> torch.Tensor:
    rows = torch.from_numpy(expert_file.rows(layer, expert).copy())
    return rows.view(DTYPES[expert_file.manifest.dtype])


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_neurons(name, tmp_path):
    """Row j is row j of the gate and of the up matrix, and column j of the down matrix."""
    manifest = write_expert_file(experts_of(make_checkpoint(name)), tmp_path / "a", FP32)
    expert_file, tensors = ExpertFile(manifest), tensors_of(name)
    mixtral = name in ("mixtral", "minimax_m2")
    prefix = "block_sparse_moe" if mixtral else "mlp"
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for entry in manifest.entries:
        at = f"model.layers.{entry.layer}.{prefix}.experts.{entry.expert}"
        gate, up, down = (tensors[f"{at}.{part}.weight"] for part in parts)
        rows = typed(expert_file, entry.layer, entry.expert)
        for j in (0, 7, len(rows) - 1):
            assert torch.equal(rows[j], torch.cat([gate[j], up[j], down[:, j]]))
        assert torch.equal(rows, torch.cat([gate, up, down.T], 1))


def test_layers_without_experts_are_left_out(tmp_path):
    experts = experts_of(make_checkpoint("qwen2_moe-normed"))
    assert write_expert_file(experts, tmp_path / "a", FP32).layers == (0, 2)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_fused_tensors(dtype, tmp_path):
    """All experts of a layer in one tensor, each read alone."""
    folder, want = _fused(tmp_path, dtype)
    expert_file = ExpertFile(write_expert_file(experts_of(folder), tmp_path / "a", dtype))
    for (layer, expert), rows in want.items():
        assert torch.equal(typed(expert_file, layer, expert), rows)


def _fused(folder: Path, dtype: torch.dtype) -> tuple[Path, dict]:
    """The olmoe checkpoint with fused experts, and their rows."""
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of("olmoe").items()}
    (folder / "fused").mkdir()
    config = (make_checkpoint("olmoe") / "config.json").read_text()
    (folder / "fused/config.json").write_text(config)
    want = {}
    for layer in range(3):
        at, gate_ups, downs = f"model.layers.{layer}.mlp.experts", [], []
        for expert in range(5):
            parts = ("gate_proj", "up_proj", "down_proj")
            gate, up, down = (tensors.pop(f"{at}.{expert}.{part}.weight") for part in parts)
            gate_ups.append(torch.cat([gate, up]))
            downs.append(down)
            want[layer, expert] = torch.cat([gate, up, down.T], 1)
        tensors[f"{at}.gate_up_proj"] = torch.stack(gate_ups)
        tensors[f"{at}.down_proj"] = torch.stack(downs)
    save_file(tensors, folder / "fused/model.safetensors")
    return folder / "fused", want


@pytest.mark.parametrize(
    ("stored", "compute", "kept"),
    [(FP32, BF16, "bf16"), (BF16, FP32, "bf16"), (FP16, BF16, "fp16"), (FP32, FP32, "fp32")],
)
def test_no_more_bytes_than_are_of_use(stored, compute, kept, tmp_path):
    folder, want = _fused(tmp_path, stored)
    expert_file = ExpertFile(write_expert_file(experts_of(folder), tmp_path / "a", compute))
    assert expert_file.manifest.dtype == kept
    for (layer, expert), rows in want.items():
        assert torch.equal(typed(expert_file, layer, expert).to(compute), rows.to(compute))


def test_the_manifest_travels_as_text(tmp_path):
    manifest = write_expert_file(
        experts_of(make_checkpoint("mixtral")), tmp_path / "a", FP32, epoch=3
    )
    assert Manifest.from_json(manifest.to_json()) == manifest == read_manifest(tmp_path / "a")
    assert manifest.epoch == 3
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.json"}
    for path in (tmp_path / "a", manifest_path(tmp_path / "a")):
        assert path.stat().st_mode & 0o777 == 0o600


WRITER = """
import sys, time
from pathlib import Path
from penstock.workers.experts import writer
partial, descriptor = writer._locked_file(Path(sys.argv[1]))
writer._reserve(descriptor, 1 << 20, Path(sys.argv[1]).parent)
print(partial, flush=True)
time.sleep(300)
"""


def test_the_file_of_a_killed_writer_is_removed_and_that_of_a_living_one_is_not(tmp_path):
    """Killed while it wrote to /dev/shm, a store left all its memory there for ever."""
    path = tmp_path / "a.experts"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        outputs = [each.stdout for each in writers if each.stdout is not None]
        partials = [Path(each.readline().decode().strip()) for each in outputs]
        assert all(each.stat().st_size == 1 << 20 for each in partials)
        assert remove_partial_files(tmp_path) == 0
        writers[0].kill()
        writers[0].wait()
        write_expert_file(experts_of(make_checkpoint("mixtral")), path, FP32)
        names = {each.name for each in tmp_path.iterdir()}
        assert names == {"a.experts", "a.experts.json", partials[1].name}
    finally:
        for each in writers:
            each.kill()
            each.wait()
        for output in outputs:
            output.close()
    assert remove_partial_files(tmp_path) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: dataclasses.replace(m, dtype="int3"),
        lambda m: dataclasses.replace(m, entries=m.entries[1:]),
        lambda m: dataclasses.replace(m, entries=(*m.entries, m.entries[0])),
        lambda m: dataclasses.replace(m, num_bytes=m.num_bytes - 4096),
        lambda m: dataclasses.replace(m, inner=m.inner + 1),
        lambda m: dataclasses.replace(
            m, entries=(dataclasses.replace(m.entries[0], offset=-4096), *m.entries[1:])
        ),
    ],
)
def test_a_manifest_that_cannot_be(damage, tmp_path):
    manifest = write_expert_file(experts_of(make_checkpoint("mixtral")), tmp_path / "a", FP32)
    with pytest.raises(LoadError, match="a"):
        Manifest.from_json(damage(manifest).to_json())
    for text in ("", "[]", '{"entries": 3}', '{"entries": [], "layers": []}'):
        with pytest.raises(LoadError, match="not a manifest"):
            Manifest.from_json(text)


@pytest.mark.parametrize("place", [0, 17])
def test_a_damaged_row_is_named(place, tmp_path):
    path = tmp_path / "a"
    manifest = write_expert_file(experts_of(make_checkpoint("mixtral")), path, FP32)
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == (2, 3))
    flip(path, entry.offset + place * manifest.row_bytes + 5)
    expert_file = ExpertFile(manifest)
    with pytest.raises(CorruptedExpert, match=r"layer 2, expert 3 is corrupted: 1 of its 112"):
        expert_file.rows(2, 3)
    with pytest.raises(CorruptedExpert, match=rf"were? .*: {place}$|: {place}$"):
        expert_file.rows(2, 3)  # it is not believed the second time either
    assert len(expert_file.rows(2, 2)) == len(expert_file.rows(1, 3)) == 112


def test_a_damaged_checksum_or_digest(tmp_path):
    path = tmp_path / "a"
    manifest = write_expert_file(experts_of(make_checkpoint("mixtral")), path, FP32)
    first = manifest.entries[0]
    lying = dataclasses.replace(first, digest="0" * 32)
    expert_file = ExpertFile(dataclasses.replace(manifest, entries=(lying, *manifest.entries[1:])))
    with pytest.raises(CorruptedExpert, match="though the checksums of its rows do"):
        expert_file.rows(first.layer, first.expert)
    flip(path, first.offset + first.num_bytes)  # a checksum: the rows are what the digest says
    assert len(ExpertFile(manifest).rows(first.layer, first.expert)) == 112


def test_files_that_are_not_used(tmp_path):
    path = tmp_path / "a"
    manifest = write_expert_file(experts_of(make_checkpoint("mixtral")), path, FP32)
    path.chmod(0o666)
    with pytest.raises(LoadError, match="writable by other users"):
        ExpertFile(manifest)
    path.chmod(0o600)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(LoadError, match="bytes; its manifest says"):
        ExpertFile(manifest)
    remove_expert_file(path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(LoadError, match="cannot be opened"):
        ExpertFile(manifest)


def test_the_map_is_read_only_and_outlives_the_file(tmp_path):
    manifest = write_expert_file(experts_of(make_checkpoint("mixtral")), tmp_path / "a", FP32)
    expert_file = ExpertFile(manifest)
    remove_expert_file(tmp_path / "a")
    rows = expert_file.rows(0, 0)
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    assert np.array_equal(rows, expert_file.rows(0, 0))


def test_no_room(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LoadError, match="expert_store_dir"):
        write_expert_file(experts_of(make_checkpoint("mixtral")), tmp_path / "a", FP32)
    assert not list(tmp_path.iterdir()), "nothing is left of it"


@pytest.mark.parametrize("copies", ["", "int8", "int4"])
def test_a_checkpoint_that_does_not_match_its_config(copies, tmp_path):
    experts = experts_of(make_checkpoint("mixtral"))
    wrong = dataclasses.replace(experts.config, num_experts=6)
    with pytest.raises(LoadError, match=r"gate\.weight' has shape \[5, 64\]"):
        write_expert_file(dataclasses.replace(experts, config=wrong), tmp_path / "a", FP32)
    missing = "model.layers.2.block_sparse_moe.experts.4.w2.weight"
    some = {name: stored for name, stored in experts.tensors.items() if name != missing}
    with pytest.raises(LoadError, match=r"experts\.4\.w2"):  # half-way through the file
        write_expert_file(
            dataclasses.replace(experts, tensors=some),
            tmp_path / "a",
            FP32,
            copies=copies,
        )
    assert not list(tmp_path.iterdir())


def test_a_damaged_int8_copy_is_named(tmp_path):
    """It has a digest of its own; the expert itself is whole."""
    path, experts = tmp_path / "a", experts_of(make_checkpoint("mixtral"))
    manifest = write_expert_file(experts, path, FP32, copies="int8")
    assert Manifest.from_json(manifest.to_json()) == manifest
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == (1, 5 + 3))
    flip(path, entry.offset + 7 * manifest.row_bytes_of(8) + 1)
    expert_file = ExpertFile(manifest)
    with pytest.raises(CorruptedExpert, match="layer 1, expert 3, its int8 copy, is corrupted"):
        expert_file.rows(1, 8)
    assert expert_file.rows(1, 3).shape == (112, 3 * 64 * 4)
    assert expert_file.rows(1, 7).shape == (112, 3 * (64 + 4))


def test_bounded_memory(tmp_path):
    """Writing holds a few experts at a time, not the model (what torch allocates is not seen)."""
    experts = experts_of(make_checkpoint("mixtral"))
    one = 3 * 64 * 112 * 4
    seen: list[int] = []
    tracemalloc.start()
    try:
        manifest = write_expert_file(experts, tmp_path / "a", FP32, on_bytes=seen.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(seen) == 15 * one == sum(entry.num_bytes for entry in manifest.entries)
    assert peak < 4 * one
