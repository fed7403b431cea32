"""What is to be sent to one ingress: a message each step, or one for several if it reads slowly.

Knows nothing of engines or sockets. While a message is stuck, later steps gather here, the deltas
of one request in one; so a slow reader holds up nobody, and costs bounded memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields

from penstock.workers.channel.framing import MessageConnection
from penstock.workers.request import Delta

log = logging.getLogger("penstock.worker")

MAX_PENDING_TOKENS = 1 << 20
_LISTS = ("token_ids", "logprobs", "prompt_logprobs")
_COUNTS = ("num_cached_tokens", "num_evicted_tokens")  # they rise; not every delta says them
_FIRST_WORDS = ("request_id", "times", "engine")
_LAST_WORDS = tuple(
    each.name for each in fields(Delta) if each.name not in (*_LISTS, *_COUNTS, *_FIRST_WORDS)
)


class Outbox:
    """The deltas on their way over one link, by stream id.

    A reader that has left more than `max_pending_tokens` lying is cut off.
    """

    def __init__(
        self,
        connection: MessageConnection,
        as_message: Callable[[Mapping[int, Delta]], bytes],
        max_pending_tokens: int = MAX_PENDING_TOKENS,
    ):
        """The link's `on_room` must call `flush`."""
        self._connection = connection
        self._as_message = as_message
        self._max_pending_tokens = max_pending_tokens
        self._pending: dict[int, Delta] = {}
        self._num_pending_tokens = 0

    def push(self, deltas: list[tuple[int, Delta]]) -> None:
        """Send the deltas of one step, or have them wait for room; on any thread, never blocks."""
        with self._connection.lock:
            for stream_id, delta in deltas:
                self._num_pending_tokens += len(delta.token_ids)
                earlier = self._pending.get(stream_id)
                self._pending[stream_id] = delta if earlier is None else joined(earlier, delta)
            self.flush()
            if self._num_pending_tokens > self._max_pending_tokens:
                self._drop("it did not read what it was sent")

    def flush(self) -> None:
        """Send what waits, if there is room; with the link's lock held."""
        if not self._pending or self._connection.is_stuck:
            return
        pending, self._pending, self._num_pending_tokens = self._pending, {}, 0
        try:
            message = self._as_message(pending)
        except Exception:  # of one link; the engine, whose thread this is, has others to serve
            log.exception("a step could not be made a message")
            self._drop("a step could not be made a message")
        else:
            self._connection.send(message)

    def _drop(self, why: str) -> None:
        self._pending, self._num_pending_tokens = {}, 0
        self._connection.end_soon(why)


def joined(earlier: Delta, later: Delta) -> Delta:
    """`earlier`, with what `later` adds: as if both had come in one step."""
    for name in _LISTS:
        getattr(earlier, name).extend(getattr(later, name))
    for name in _COUNTS:
        setattr(earlier, name, max(getattr(earlier, name), getattr(later, name)))
    for name in _LAST_WORDS:
        setattr(earlier, name, getattr(later, name))
    return earlier
