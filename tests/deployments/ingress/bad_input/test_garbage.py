"""Full collections come in quiet moments, and in time where there is none."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.deployments.ingress import garbage


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.me = self


def full_collections(passed_s: float, num_open: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Within five looks, by a clock that passes `passed_s` each time that it is read."""
    monkeypatch.setattr(garbage, "LOOK_S", 0.0)
    now, found, num_looks = [0.0], [0], [0]

    def clock() -> float:
        now[0] += passed_s
        return now[0]

    def opened() -> int:
        num_looks[0] += 1
        return num_open

    def count(phase: str, info: dict[str, int]) -> None:
        found[0] += phase == "start" and info["generation"] == 2

    async def scenario() -> None:
        task = asyncio.ensure_future(garbage.collect_in_quiet(opened, clock))
        while num_looks[0] < 5:
            await asyncio.sleep(0)
        task.cancel()

    gc.callbacks.append(count)
    try:
        asyncio.run(scenario())
    finally:
        gc.callbacks.remove(count)
    return found[0]


def test_in_quiet_cycles_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage.freeze()
    gone = weakref.ref(Cycle())
    assert full_collections(0.0, garbage.FEW_CALLS, monkeypatch) == 5
    assert gone() is None


def test_none_under_load_but_after_the_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage.freeze()
    assert full_collections(0.0, garbage.FEW_CALLS + 1, monkeypatch) == 0
    assert full_collections(garbage.LONGEST_S, garbage.FEW_CALLS + 1, monkeypatch) == 5


def test_many_objects_begin_no_full_collection() -> None:
    garbage.freeze()
    before = gc.get_stats()[2]["collections"]
    kept = [[n] for n in range(2_000_000)]
    assert gc.get_stats()[2]["collections"] == before and len(kept) == 2_000_000
