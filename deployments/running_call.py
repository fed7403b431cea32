"""One request under way at the ingress: what its worker sent, and when its reader is told of it.

Knows nothing of workers, sockets or text. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.workers.outbox import joined
from penstock.workers.request import Delta, FinishReason, Request

# Each message to a client costs the ingress CPU time, whatever is in it. Where it has many streams,
# none gets a message sooner than this after the last one; a first or last token never waits.
GATHER_S = 0.02
FEW_CALLS = 8  # on a link: so many cost little, and are never held up


@dataclass(slots=True, eq=False)
class RunningCall:
    """One request on its way: where it runs, and what came of it so far."""

    request: Request
    num_expected: int  # tokens still to compute, prompt included, as far as one can guess
    pending: list[Delta] = field(default_factory=list)  # not taken yet: one, and perhaps an error
    has_pending: asyncio.Event = field(default_factory=asyncio.Event)
    woken_s: float = 0.0  # when its reader was last told of something
    link: Any = None
    stream_id: int = 0
    num_emitted: int = 0
    num_declined: int = 0  # times that a worker had no room
    is_second_try: bool = False

    def add(self, delta: Delta) -> None:
        """Put `delta` to what its reader has not taken yet; tokens before an error stay apart."""
        if self.pending and delta.finish_reason is not FinishReason.ERROR:
            joined(self.pending[-1], delta)
        else:
            self.pending.append(delta)

    def fail(self, code: str) -> None:
        self.link = None
        self.add(Delta(self.request.request_id, [], FinishReason.ERROR, error=code))
        self.has_pending.set()

    def tell(self, now_s: float) -> None:
        """Wake the reader."""
        self.woken_s = now_s
        self.has_pending.set()

    async def next(self) -> Delta:
        """All that has come since the last time; waits until there is something."""
        await self.has_pending.wait()
        delta = self.pending.pop(0)
        if not self.pending:
            self.has_pending.clear()
        return delta


class Gathering:
    """Decides who is not told yet, of the calls of one link. `end` tells all that are held."""

    def __init__(self, end: Callable[[float], None]):
        self._end = end
        self._timer: asyncio.TimerHandle | None = None

    def holds(self, call: RunningCall, num_calls: int, now_s: float) -> bool:
        """Whether what came for `call` waits for more, or for `end`, whichever is first."""
        if num_calls <= FEW_CALLS or now_s >= call.woken_s + GATHER_S:
            return False
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(call.woken_s + GATHER_S, self._on_time)
        return True

    def _on_time(self) -> None:
        self._timer = None
        self._end(asyncio.get_running_loop().time())
