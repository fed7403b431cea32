"""What waits to be sent to one ingress: in on the engine thread, out on the event loop.

Knows nothing of gRPC or engines. While a message is being written, later steps gather here, the
deltas of one request in one; so a slow reader holds up nobody, and costs bounded memory.
"""

from __future__ import annotations

import asyncio
import threading

from penstock.workers.request import Delta

MAX_PENDING_TOKENS = 1 << 20


class Outbox:
    """The queue of one stream. `overflowed` is set when its reader has left too much lying."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_pending_tokens: int):
        self._loop = loop
        self._max_pending_tokens = max_pending_tokens
        self._lock = threading.Lock()
        self._pending: dict[int, Delta] = {}
        self._num_pending_tokens = 0
        self._report_due = False
        self._filled = asyncio.Event()
        self._waking = False
        self.overflowed = asyncio.Event()

    def push(self, deltas: list[tuple[int, Delta]]) -> None:
        """Take the deltas of one step, by stream id; on any thread. Wakes the loop at most once."""
        with self._lock:
            for stream_id, delta in deltas:
                self._num_pending_tokens += len(delta.token_ids)
                earlier = self._pending.get(stream_id)
                self._pending[stream_id] = delta if earlier is None else joined(earlier, delta)
            wake, self._waking = not self._waking, True
            flooded = self._num_pending_tokens > self._max_pending_tokens
        if flooded:
            self._loop.call_soon_threadsafe(self.overflowed.set)
        elif wake:
            self._loop.call_soon_threadsafe(self._filled.set)

    def ask_report(self) -> None:
        """Have a report sent soon; on the event loop."""
        self._report_due = True
        self._filled.set()

    async def take(self) -> tuple[dict[int, Delta], bool]:
        """Wait for something to send: deltas by stream id, and whether a report is due."""
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            pending, self._pending, self._waking = self._pending, {}, False
            self._num_pending_tokens = 0
        report_due, self._report_due = self._report_due, False
        return pending, report_due


def joined(earlier: Delta, later: Delta) -> Delta:
    """`earlier`, with what `later` adds: as if both had come in one step."""
    earlier.token_ids.extend(later.token_ids)
    earlier.logprobs.extend(later.logprobs)
    earlier.prompt_logprobs.extend(later.prompt_logprobs)
    earlier.finish_reason = later.finish_reason
    earlier.stop_token_id = later.stop_token_id
    earlier.error_message, earlier.error_param = later.error_message, later.error_param
    earlier.error = later.error
    return earlier
