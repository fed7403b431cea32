"""Memory for weights and KV: pieces do not overlap, and a slab goes with its last piece."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from penstock.kernels.cpu import huge_pages
from penstock.workers.memory.arena import Arena, BlockLayout


@pytest.fixture(autouse=True)
def _fresh_slab(monkeypatch):
    monkeypatch.setattr(huge_pages, "_current", None)


def test_pieces_are_apart_and_aligned():
    shapes = [(3, 70_001), (1000, 200), (65_537,), (7, 7), (40 * 2**20,), (30 * 2**20,)]
    dtypes = [torch.uint8, torch.float32, torch.bfloat16, torch.float32, torch.uint8, torch.uint8]
    pieces = [huge_pages.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for i, piece in enumerate(pieces):
        assert piece.shape == shapes[i] and piece.dtype == dtypes[i] and piece.is_contiguous()
        assert piece.data_ptr() % huge_pages.ALIGN_BYTES == 0 or piece.nbytes < 2**16
        piece.fill_(i + 1)
    assert all(bool((piece == i + 1).all()) for i, piece in enumerate(pieces))


def test_a_slab_goes_with_its_last_piece():
    one, two = (huge_pages.empty((100_000,), torch.uint8) for _ in range(2))
    assert two.data_ptr() - one.data_ptr() == 100_096
    assert huge_pages._current is not None
    mapping = huge_pages._current._mapping
    view = two[5:]
    del one, two
    gc.collect()
    assert mapping() is not None, "a view keeps the memory"
    view.fill_(1)
    del view
    gc.collect()
    assert mapping() is None
    assert huge_pages.empty((100_000,), torch.uint8).fill_(3).sum() == 300_000


def test_a_large_weight_has_a_slab_of_its_own():
    small = huge_pages.empty((100_000,), torch.uint8)
    slab = huge_pages._current
    large = huge_pages.empty((huge_pages.SLAB_BYTES,), torch.uint8)
    assert huge_pages._current is slab
    more = huge_pages.empty((100_000,), torch.uint8)
    assert more.data_ptr() - small.data_ptr() == 100_096
    assert large.nbytes == huge_pages.SLAB_BYTES


def test_memory_alone_goes_with_its_tensor(monkeypatch):
    made = []

    class Mapping(mmap.mmap):
        def __new__(cls, *args, **kwargs):
            made.append(weakref.ref(mapping := super().__new__(cls, *args, **kwargs)))
            return mapping

    monkeypatch.setattr(mmap, "mmap", Mapping)
    one = huge_pages.empty((100_000,), torch.uint8)
    alone = huge_pages.empty((3, 100_000), torch.bfloat16, alone=True)
    two = huge_pages.empty((100_000,), torch.uint8)
    assert two.data_ptr() - one.data_ptr() == 100_096 and len(made) == 2
    assert alone.shape == (3, 100_000) and alone.fill_(2).sum(dtype=torch.float32) == 600_000
    del alone
    gc.collect()
    assert made[1]() is None and made[0]() is not None


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages"
)
def test_the_kv_of_a_worker_may_be_in_huge_pages():
    layout = BlockLayout(3, 2, 16, 64, torch.bfloat16)
    arena = Arena(layout, 100, torch.device("cpu"), reserve_bytes=1000)
    assert arena.num_bytes == 100 * layout.block_bytes + 1024
    assert "hg" in flags_of(arena.storage.data_ptr())  # what MADV_HUGEPAGE leaves
    assert "hg" not in flags_of(torch.empty(2**25, dtype=torch.uint8).data_ptr())


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping at `address` of this process."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            holds = first <= address < last
        elif holds and name == "VmFlags:":
            return rest
    raise AssertionError("no mapping there")


def test_a_system_without_huge_pages(monkeypatch):
    def refuses(*_):
        raise OSError("not supported")

    class Mapping(mmap.mmap):
        madvise = refuses

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert huge_pages.empty((100_000,), torch.uint8).fill_(1).sum() == 100_000
