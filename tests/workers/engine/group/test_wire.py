"""What the first rank tells the others of a step: it arrives whole, and nothing else is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engine.group import wire
from penstock.workers.errors import InvariantError
from penstock.workers.models.host_batch import GroupStep, HostBatch, HostRolling, HostStates


def made(decode: int, chunks: int, width: int, rolled: bool, states: bool, seed: int) -> HostBatch:
    """Any numbers of these shapes; two rows of each chunk."""
    random, rows, num = np.random.default_rng(seed), decode + 2 * chunks, decode + chunks

    def ints(*shape: int, wide: bool = False) -> Any:
        return random.integers(-9, 1 << 30, shape).astype(np.int64 if wide else np.int32)

    rolling = None
    if rolled:
        rolling = HostRolling(
            ints(rows, wide=True), *(ints(rows), ints(rows)), *(ints(num),) * 2, 7
        )
    kept = HostStates(ints(num + 1), ints(num), ints(num + 1), *(ints(3),) * 2) if states else None
    return HostBatch(
        token_ids=ints(rows, wide=True),
        positions=ints(rows, wide=True),
        slots=ints(rows, wide=True),
        decode_tables=ints(decode, width),
        decode_lens=ints(decode),
        prefill_tables=ints(chunks, width),
        prefill_starts=ints(chunks + 1),
        prefill_lens=ints(chunks),
        max_prefill_chunk=2 * bool(chunks),
        unread=np.zeros((2, 0), dtype=np.int64),
        rolling=rolling,
        states=kept,
        uses_scratch=bool(seed % 2),
    )


def fields(part: HostBatch | HostRolling | HostStates) -> dict[str, Any]:
    return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, HostRolling | HostStates):
            assert_equal(fields(found[name]), fields(value))
        elif isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert np.array_equal(found[name], value), name
        else:
            assert found[name] == value, name


@given(
    st.integers(0, 5), st.integers(0, 3), st.integers(0, 4), st.booleans(), st.booleans(),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_step_travels(decode, chunks, width, rolled, states, has_modes, is_graph, shares_ids):
    batch = made(decode, chunks, width, rolled, states, seed=decode)
    modes = np.arange(len(batch.token_ids), dtype=np.int32) if has_modes else None
    step = GroupStep(batch, modes, is_graph, shares_ids)
    contents = wire.step_bytes(step)
    found = wire.step_from(contents)
    assert (found.is_graph, found.shares_ids) == (is_graph, shares_ids)
    assert_equal(fields(found.batch), fields(step.batch))
    if modes is None:
        assert found.modes is None
    else:
        assert found.modes is not None and np.array_equal(found.modes, modes)
    for wrong in (contents[:-1], contents + b"\0", contents[:20]):
        with pytest.raises(InvariantError, match="a step's message is too"):
            wire.step_from(wrong)


def test_a_negative_size_is_refused():
    contents = bytearray(wire.step_bytes(GroupStep(made(2, 1, 3, False, False, 0))))
    contents[64 + 16 : 64 + 24] = (-2).to_bytes(8, "little", signed=True)  # rows of the first array
    with pytest.raises(InvariantError, match="of a negative size"):
        wire.step_from(bytes(contents))
