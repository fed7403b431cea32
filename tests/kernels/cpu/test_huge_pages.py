"""Memory for weights: pieces do not overlap, and a slab goes with its last piece."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from penstock.kernels.cpu import huge_pages


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


def test_a_system_without_huge_pages(monkeypatch):
    def refuses(*_):
        raise OSError("not supported")

    class Mapping(mmap.mmap):
        madvise = refuses

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert huge_pages.empty((100_000,), torch.uint8).fill_(1).sum() == 100_000
