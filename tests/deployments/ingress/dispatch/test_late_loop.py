"""An event loop that stands still keeps its streams: heartbeats come from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.bounds.loop_watch import LoopWatch
from penstock.workers.channel import server
from tests.deployments.ingress.dispatch.test_pool import alone, pool_of, request
from tests.deployments.waiting import eventually

LONG = request(3, 1950)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    return alone(model, LONG)


@pytest.mark.parametrize("is_watched", [True, False])
def test_streams_outlast_a_loop_that_stands_still(
    expected: list[int],
    nodes: Any,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_watched: bool,
) -> None:
    """The worker's patience is shortened: 1.2 s instead of 10, for a loop that stops for 3 s.

    Without the watch it stops until the worker has ended the connection, which counts its own turns
    and no seconds: for longer where the machine stands still, too.
    """
    monkeypatch.setattr(server, "SILENCE_TICKS", 12)
    node = nodes[0]

    async def scenario() -> tuple[list[int], int]:
        async with pool_of(node) as pool:
            watch = asyncio.ensure_future(
                LoopWatch(pool.beat if is_watched else lambda: None).run()
            )
            await asyncio.sleep(0.2)
            ids: list[int] = []
            async with contextlib.aclosing(pool.generate(AdmissionRequest(LONG))) as deltas:
                async for delta in deltas:
                    if not ids and is_watched:
                        time.sleep(3.0)
                    elif not ids:
                        eventually(lambda: not node.channel._connections.peers)
                    ids += delta.token_ids
            watch.cancel()
            return ids, pool.lost_requests.num_continued

    ids, num_continued = run(scenario())
    assert ids == expected
    # Without the watch the worker ends the connection, and the request is computed again.
    assert num_continued == (0 if is_watched else 1)
