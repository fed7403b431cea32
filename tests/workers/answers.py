"""What an engine answers to requests that come at once; memory that is poisoned on release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.workers.engine.engine import Engine
from penstock.workers.request import Delta, Request


def answers(
    engine: Engine, requests: Sequence[Request], check: Callable[[], object] = lambda: None
) -> dict[str, list[Delta]]:
    """The deltas of each request. After every step the block ledger is checked, and `check` run."""
    found: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta
            found[delta.request_id].append(delta)
        engine.check()
        check()
    return found


def ids_of(deltas: Sequence[Delta]) -> list[int]:
    """All tokens of one answer."""
    return [token for delta in deltas for token in delta.token_ids]


def poison_released(engine: Any) -> None:
    """From now on each block that no sequence holds any more is filled with NaN."""
    pool, release = engine.pool, engine.pool.release

    def release_and_poison(block_id: int, **how: Any) -> None:
        release(block_id, **how)
        if block_id in pool._free:
            engine.arena.block(block_id).fill_(0xFF)

    pool.release = release_and_poison
