"""Packed weights on the disk: what comes back has the same bits, what changed is packed again, and
whatever is wrong with a file, the model loads."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.packed import described, tensors_of
from penstock.kernels.types import PackedLinear
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import MEMORY, Rank
from penstock.workers.models.weight_summary import linears_of
from penstock.workers.packed import cache as packed_cache
from penstock.workers.packed import file as packed_file
from penstock.workers.packed.cache import PackedCache, PackedEntry
from penstock.workers.packed.parts import Part
from penstock.workers.progress import KEEPING, LOADING, Progress
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.sources import CheckpointWeights
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint

PROMPT = tuple(range(3, 40))
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", max_bytes=1 << 30, least_bytes=0)


@pytest.fixture
def no_source(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights of linear layers and embeddings that are taken from the checkpoint."""
    taken: list[str] = []
    take, take_linear, take_expert = (
        getattr(CheckpointWeights, name) for name in ("take", "take_linear", "take_expert")
    )

    def noted(method: Any) -> Any:
        def call(self: Any, name: str, *args: Any, **named: Any) -> Any:
            taken.append(name)
            return method(self, name, *args, **named)

        return call

    monkeypatch.setattr(CheckpointWeights, "take", noted(take))
    monkeypatch.setattr(CheckpointWeights, "take_linear", noted(take_linear))
    monkeypatch.setattr(CheckpointWeights, "take_expert", noted(take_expert))
    return taken


def linears(decoder: Decoder) -> list[PackedLinear]:
    return [*linears_of(decoder.layers), decoder.lm_head]


def assert_same(found: Decoder, expected: Decoder) -> None:
    """To the last bit, and in all that a product depends on."""
    for one, other in zip(linears(found), linears(expected), strict=True):
        assert described(one) == described(other)
        mine, its = tensors_of(one), tensors_of(other)
        assert mine.keys() == its.keys()
        for name, tensor in its.items():
            assert mine[name].dtype == tensor.dtype and mine[name].shape == tensor.shape
            assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert (one.bias is None) == (other.bias is None)
        if one.bias is not None and other.bias is not None:
            assert one.bias.dtype == other.bias.dtype and torch.equal(one.bias, other.bias)
    assert found.embedding.dtype == expected.embedding.dtype
    assert torch.equal(found.embedding, expected.embedding)
    assert found.weights == expected.weights


def greedy(decoder: Decoder) -> list[int]:
    config = EngineConfig(num_blocks=32, device="cpu")
    engine = Engine(config, decoder)
    request = Request("a", PROMPT, PARAMS)
    return ids_of(answers(engine, [request])["a"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"weights": "int8"}),
        ("llama", {"weights": "int8", "int8_group": None, "quantize_lm_head": True}),
        ("llama", {"weights": "int4", "int4_wide_layers": True}),
        ("llama", {"weights": "nf4"}),
        ("llama", {"weights": "fp8", "quantize_o": False}),
        ("llama-tied", {"weights": "int4"}),
        ("llama-bias", {"weights": "int8", "dtype": "bf16"}),
        ("qwen2", {"weights": "nf4", "dtype": "bf16"}),
        ("mixtral", {"weights": "int8"}),
        ("qwen2_moe", {"weights": "int4"}),
        ("granitemoe", {"weights": "int8"}),
        ("gpt_oss", {"weights": "int8"}),
        ("qwen3_next", {"weights": "int8"}),
        ("phi3", {"weights": "int4"}),
    ],
)
def test_the_next_load_has_the_same_bits(
    cache: PackedCache, no_source: list[str], name: str, options: dict[str, Any]
) -> None:
    folder = make_checkpoint(name)
    expected = load_model(folder, **options, progress=False)
    phases: list[Progress] = []
    first = load_model(folder, **options, progress=phases.append, cache=cache)
    assert [p.done for p in phases if p.phase == KEEPING][-1] > 0
    assert len(list(cache.folder.iterdir())) == 1
    no_source.clear()
    phases.clear()
    second = load_model(folder, **options, progress=phases.append, cache=cache)
    small = ("norm", "router", "gate.", "sinks", "bias", "conv1d", "A_log")
    assert [each for each in no_source if not any(part in each for part in small)] == []
    assert {p.phase for p in phases} == {LOADING} and phases[-1].percent == 100
    assert_same(first, expected)
    assert_same(second, expected)
    assert greedy(second) == greedy(expected)


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "llama-tied"])
def test_each_rank_of_a_group_has_its_file(cache: PackedCache, name: str) -> None:
    folder, sizes = make_checkpoint(name), ExchangeSizes(16, 4)
    descriptor = os.memfd_create("penstock-test")
    os.ftruncate(descriptor, sizes.bytes_of(ModelConfig.from_pretrained(folder), 2))
    try:
        for number in range(2):
            rank = Rank(number, 2, MEMORY, sizes, descriptor)
            expected = load_model(folder, weights="int8", progress=False, rank=rank)
            for _ in range(2):
                found = load_model(folder, weights="int8", progress=False, rank=rank, cache=cache)
                assert_same(found, expected)
            assert len(paths(cache)) == number + 1
    finally:
        os.close(descriptor)


def paths(cache: PackedCache) -> set[str]:
    return {each.name for each in cache.folder.iterdir()}


def test_another_setting_or_another_file_is_another_model(
    cache: PackedCache, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make_checkpoint("llama"), folder)
    for options in (
        {"weights": "int8"},
        {"weights": "int4"},
        {"weights": "int8", "int8_group": 32},
        {"weights": "int8", "dtype": "bf16"},
        {"weights": "int8", "quantize_o": False},
        {"weights": "int8", "quantize_lm_head": True},
    ):
        before = paths(cache) if cache.folder.exists() else set()
        load_model(folder, **options, progress=False, cache=cache)
        assert len(paths(cache)) == len(before) + 1, options
        load_model(folder, **options, progress=False, cache=cache)
        assert len(paths(cache)) == len(before) + 1, options
    before = paths(cache)
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 0x40  # of the same size, and, below, of the same time to the second
    stat = weights.stat()
    weights.write_bytes(raw)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    changed = load_model(folder, weights="int8", progress=False, cache=cache)
    assert len(paths(cache) - before) == 1
    assert_same(changed, load_model(folder, weights="int8", progress=False))


STATED = """
from dataclasses import replace
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import _packing
from penstock.workers.quantization import StoredScheme, WeightPlan
import sys
config = ModelConfig.from_pretrained(sys.argv[1])
modules = frozenset(f"model.layers.{n}.mlp.down_proj" for n in range(20))
scheme = StoredScheme("compressed-tensors", ("int4", "int8"), step_group=16, int8_modules=modules)
print(_packing(replace(config, stored_scheme=scheme), WeightPlan(), None, False))
"""


def test_every_process_means_the_same_file() -> None:
    """Sets of text have another order in each process."""
    found = {
        subprocess.run(
            [sys.executable, "-c", STATED, make_checkpoint("llama")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    (text,) = found
    assert "int8_modules=['model.layers.0.mlp.down_proj'" in text and "num_layers=3" in text


def test_what_other_code_packed_is_replaced(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama")
    load_model(folder, weights="int8", progress=False, cache=cache)
    (old,) = paths(cache)
    monkeypatch.setattr(packed_cache, "_code_digest", lambda: "of another version")
    load_model(folder, weights="int8", progress=False, cache=cache)
    (new,) = paths(cache)
    assert new != old and new.partition("-")[0] == old.partition("-")[0]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_packed_again(
    cache: PackedCache, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    folder = make_checkpoint("llama")
    expected = load_model(folder, weights="int8", progress=False, cache=cache)
    (file,) = cache.folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert_same(load_model(folder, weights="int8", progress=False, cache=cache), expected)
    assert "packed again" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("what", "by"),
    [
        (b'"kind": "NativeWeight"', b'"kind": "NativeWaight"'),
        (b'"linear"', b'"lineal"'),
        (b'"in_features"', b'"in_featurez"'),
        (b'"facts":', b'"fakts":'),
        (b'"head"', b'"haed"'),
    ],
)
def test_a_file_of_another_form_is_packed_again(
    cache: PackedCache, caplog: pytest.LogCaptureFixture, what: bytes, by: bytes
) -> None:
    folder = make_checkpoint("llama")
    expected = load_model(folder, weights="int8", progress=False, cache=cache)
    (file,) = cache.folder.iterdir()
    whole = file.read_bytes()
    assert what in whole
    file.write_bytes(whole.replace(what, by))
    assert_same(load_model(folder, weights="int8", progress=False, cache=cache), expected)
    assert "packed again" in caplog.text
    assert file.read_bytes() == whole


def test_what_was_used_longest_ago_goes_first(cache: PackedCache) -> None:
    folder, files = make_checkpoint("llama"), dict[str, Path]()

    def load(format: str, max_bytes: int = 1 << 30) -> None:
        limited = replace(cache, max_bytes=max_bytes)
        load_model(folder, weights=format, progress=False, cache=limited)
        new = set(cache.folder.iterdir()) - set(files.values())
        for each in new:
            files[format] = each

    for seconds, format in enumerate(("nf4", "int8", "fp8")):
        load(format)
        os.utime(files[format], (seconds, seconds))
    load("nf4")  # read, so now it is the newest
    load("int4", max_bytes=sum(each.stat().st_size for each in files.values()))
    assert set(cache.folder.iterdir()) == {files[each] for each in ("nf4", "fp8", "int4")}


def test_what_does_not_fit_is_not_kept(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = make_checkpoint("llama")
    small = replace(cache, max_bytes=1000)
    expected = load_model(folder, weights="int8", progress=False, cache=small)
    assert "packed_cache_gb allows 1000 bytes" in caplog.text and not cache.folder.exists()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 9, 9)
    )
    full = load_model(folder, weights="int8", progress=False, cache=cache)
    assert "disk has 9 bytes free" in caplog.text
    assert_same(full, expected)
    assert paths(cache) == set()
    large = PackedCache(cache.folder, 1 << 30)
    assert large.entry(folder, 15 << 20, "") is None
    assert large.entry(folder, 17 << 20, "") is not None
    load_model(folder, weights="int8", progress=False, cache=large)
    assert paths(cache) == set()


def test_a_disk_that_is_full_keeps_nothing_of_it(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Any, parts: Any, on_bytes: Any) -> None:
        file.write(bytes(100_000))
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = make_checkpoint("llama")
    expected = load_model(folder, weights="int8", progress=False)
    with monkeypatch.context() as patched:
        patched.setattr(packed_file, "write", full)
        found = load_model(folder, weights="int8", progress=False, cache=cache)
    assert_same(found, expected)
    assert "No space left on device" in caplog.text and paths(cache) == set()
    load_model(folder, weights="int8", progress=False, cache=cache)
    assert len(paths(cache)) == 1


def test_a_folder_that_may_only_be_read_is_read(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, no_source: list[str]
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = make_checkpoint("llama")
    expected = load_model(folder, weights="int8", progress=False, cache=cache)
    no_source.clear()
    monkeypatch.setattr(os, "utime", refused)
    assert_same(load_model(folder, weights="int8", progress=False, cache=cache), expected)
    assert not [each for each in no_source if each.endswith("_proj")]


def test_what_another_process_has_kept_meanwhile_stays(cache: PackedCache) -> None:
    folder = make_checkpoint("llama")
    load_model(folder, weights="int8", progress=False, cache=cache)
    (file,) = cache.folder.iterdir()
    inode = file.stat().st_ino
    expected = load_model(folder, weights="int8", progress=False)
    kept: dict[str, Part] = {str(number): each for number, each in enumerate(linears(expected))}
    meant, _, code = file.stem.partition("-")
    PackedEntry(cache, meant, code).keep(kept, lambda _: None)
    assert file.stat().st_ino == inode and paths(cache) == {file.name}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plain_weights_are_not_kept(cache: PackedCache, dtype: str) -> None:
    load_model(make_checkpoint("llama"), weights=dtype, progress=False, cache=cache)
    assert not cache.folder.exists()


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = PackedCache(tmp_path / "file" / "packed", 1 << 30, least_bytes=0)
    expected = load_model(make_checkpoint("llama"), weights="int8", progress=False)
    found = load_model(make_checkpoint("llama"), weights="int8", progress=False, cache=cache)
    assert_same(found, expected)
    assert "not kept in" in caplog.text


def test_one_process_writes_and_what_ended_ones_left_is_removed(cache: PackedCache) -> None:
    folder = make_checkpoint("llama")
    load_model(folder, weights="int8", progress=False, cache=cache)
    (file,) = cache.folder.iterdir()
    file.unlink()
    other = cache.folder / "ended.part"
    other.write_bytes(b"what a process left that was killed")
    unfinished = file.with_suffix(".part")
    with unfinished.open("wb") as held:
        held.write(b"half of it")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        load_model(folder, weights="int8", progress=False, cache=cache)
        assert not file.exists() and unfinished.read_bytes() == b"half of it"
    load_model(folder, weights="int8", progress=False, cache=cache)
    assert paths(cache) == {file.name}


def test_the_settings_say_where_and_whether(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = PackedCache.of(EngineConfig(), "cpu")
    assert default is not None
    assert default.folder == tmp_path / "penstock" / "packed" and default.max_bytes == 20 << 30
    asked = PackedCache.of(EngineConfig(packed_cache_dir="~/p", packed_cache_gb=0.5), "cpu")
    assert asked is not None
    assert asked.folder == Path.home() / "p" and asked.max_bytes == 1 << 29
    assert PackedCache.of(EngineConfig(packed_cache_gb=0), "cpu") is None
    assert PackedCache.of(EngineConfig(), "cuda") is None


def test_a_server_reads_what_an_earlier_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_source: list[str]
) -> None:
    monkeypatch.setattr(PackedCache, "of", lambda *_: PackedCache(tmp_path, 1 << 30, 0))
    config = EngineConfig(
        model=str(make_checkpoint("llama")), weights="int8", num_blocks=32, device="cpu",
        speculate="draft", draft_weights="int4",
    )  # fmt: skip
    request = Request("a", PROMPT, PARAMS)
    found = []
    for _ in range(2):
        no_source.clear()
        engine = load_engine(config)
        found.append(ids_of(answers(engine, [request])["a"]))
        engine.close()
    assert found[0] == found[1]
    assert len(list(tmp_path.iterdir())) == 2  # the model's, and those of itself as a draft
    assert not [each for each in no_source if each.endswith("_proj")]
