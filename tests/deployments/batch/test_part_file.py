"""The part file: whatever is cut off its end, whole records stay and nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.batch.part_file import ERROR, OUTPUT, PartFile, TokenCounts

RECORDS = [
    (3, OUTPUT, b'{"custom_id":"c"}', TokenCounts(5, 1, 7, 2)),
    (1, ERROR, b'{"custom_id":"a b"}', TokenCounts()),
    (2, OUTPUT, b'{"text":"\\u00e9 1 2 3"}', TokenCounts(1, 0, 2, 0)),
]


def written(folder: Path) -> tuple[Path, list[int]]:
    """A part file with RECORDS, and its size after each."""
    path, ends = folder / "part", []
    part = PartFile(path)
    for record in RECORDS:
        part.append(*record)
        ends.append(path.stat().st_size)
    part.close()
    return path, ends


@given(st.data())
def test_a_file_cut_at_any_byte_keeps_its_whole_records_and_can_be_completed(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, ends = written(folder)
        cut = data.draw(st.integers(0, ends[-1]))
        path.write_bytes(path.read_bytes()[:cut])
        num_whole = sum(end <= cut for end in ends)
        part = PartFile(path)
        assert list(part) == [number for number, *_ in RECORDS[:num_whole]]
        assert path.stat().st_size == (ends[num_whole - 1] if num_whole else 0)
        for record in RECORDS[num_whole:]:
            part.append(*record)
        assert part.write_sorted(OUTPUT, folder / "out") == 2
        assert part.write_sorted(ERROR, folder / "err") == 1
        part.close()
        assert (folder / "out").read_bytes() == RECORDS[2][2] + b"\n" + RECORDS[0][2] + b"\n"
        assert (folder / "err").read_bytes() == RECORDS[1][2] + b"\n"


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_costs_its_record_and_those_after_it(position, flip):
    with tempfile.TemporaryDirectory() as folder:
        path, ends = written(Path(folder))
        content = bytearray(path.read_bytes())
        position %= len(content)
        content[position] ^= flip
        path.write_bytes(content)
        part = PartFile(path)
        assert len(part) == sum(end <= position for end in ends)
        part.close()


def test_counts_survive_and_a_second_result_of_a_line_is_dropped(tmp_path):
    path, _ = written(tmp_path)
    part = PartFile(path)
    part.append(3, ERROR, b"{}", TokenCounts(100))
    assert (part.num_completed, part.num_failed) == (2, 1)
    assert part.tokens == TokenCounts(6, 1, 9, 2)
    assert 3 in part
    assert 4 not in part
    part.close()


def test_a_disk_that_is_full_leaves_whole_records(tmp_path, monkeypatch):
    path, ends = written(tmp_path)
    part = PartFile(path)
    real = os.pwrite

    def short(fd, content, offset):
        if len(content) < 10:
            raise OSError(28, "No space left on device")
        return real(fd, content[:10], offset)

    monkeypatch.setattr(os, "pwrite", short)
    with pytest.raises(OSError, match="No space"):
        part.append(9, OUTPUT, json.dumps({"a": "b" * 95}).encode(), TokenCounts())
    monkeypatch.undo()
    assert path.stat().st_size == ends[-1]
    part.append(9, OUTPUT, b"{}", TokenCounts())
    part.close()
    assert sorted(PartFile(path)) == [1, 2, 3, 9]
