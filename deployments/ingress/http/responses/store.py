"""Responses that clients may come back for: in the memory of one ingress, and bounded.

Without a state store they are nowhere else: another ingress, or this one after a restart, does not
have them. With one, those that run in the background are here, until they are in the store.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.responses.draft import ResponseBuilder
from penstock.deployments.ingress.http.responses.items import Message

MAX_ENTRIES = 1024
MAX_BYTES = 64 << 20
MAX_RUNNING = 64  # responses that run in the background, without a client
MAX_RUNNING_OF_PRINCIPAL = 32  # where callers have keys
TTL_S = 3600.0
ENTRY_BYTES = 8 << 10  # what an entry takes in addition to its texts


@dataclass(eq=False)
class StoredResponse:
    """A response, and the conversation that led to it. `frames` are the events of one that runs in
    the background and was asked for as a stream."""

    draft: ResponseBuilder
    principal: str
    messages: tuple[Message, ...]
    request_id: str = ""
    is_background: bool = False
    num_input: int = 0  # messages before the answer
    texts: tuple[str, ...] = ()  # further texts of the request that are kept
    frames: list[bytes] | None = None
    task: asyncio.Task[None] | None = None
    version: int | None = None  # of the value in the state store
    is_lost: bool = False  # another ingress goes on with it
    expires_s: float = 0.0
    num_bytes: int = ENTRY_BYTES
    count_growth: Callable[[int], None] | None = None  # the store's, while it has this entry
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.draft.is_done

    def measure(self) -> int:
        """Bytes of everything that grows with requests and answers."""
        texts = (*self.texts, self.draft.said, *map(_text, self.messages))
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return ENTRY_BYTES + num_bytes + sum(map(len, self.frames or ()))

    def tell(self, frames: list[bytes]) -> None:
        """Wake the clients that follow. `frames` are kept only if a client may ask for them again,
        that is, for a stream in the background."""
        if self.frames is not None:
            self.frames += frames
            if self.count_growth is not None:
                self.count_growth(sum(map(len, frames)))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The frames after number `after`, those to come included.

        Raises ServiceError worker_lost if another ingress goes on with the response.
        """
        assert self.frames is not None, "only streams in the background keep their frames"
        num_sent = after + 1
        while True:
            changed, is_last = self._changed, not self.is_running
            while num_sent < len(self.frames):
                yield self.frames[num_sent]
                num_sent += 1
            if is_last or self.is_lost:
                if self.is_lost:
                    raise ServiceError("worker_lost")
                return
            if changed is self._changed:
                await changed.wait()


def _text(message: Message) -> str:
    """All that a message holds, calls and reasoning included."""
    rest = message.get("tool_calls")
    texts = [v for name, v in message.items() if isinstance(v, str) and name != "role"]
    return "".join(texts) + (json.dumps(rest, ensure_ascii=False) if rest else "")


class ResponseStore:
    """Keeps the newest responses within all bounds; none that still runs is dropped.

    Without room the oldest goes of the principal that has most, so that none drops another's.
    """

    def __init__(
        self,
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_running: int = MAX_RUNNING,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_running = max_running
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[str, StoredResponse] = {}  # oldest first
        self._bytes_of: Counter[str] = Counter()  # by principal
        self._num_of: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._bytes_of.total()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, response_id: str, principal: str) -> StoredResponse | None:
        """The response of that id, if this principal made it and it is still kept."""
        self._drop_old()
        entry = self._entries.get(response_id)
        return entry if entry is not None and entry.principal == principal else None

    def running(self) -> list[StoredResponse]:
        """Those that run in the background."""
        return [entry for entry in self._entries.values() if entry.is_running]

    def check_room(self, num_starting: int = 0, principal: str = "") -> None:
        """Raise ServiceError if no further response may run in the background.

        `num_starting`: responses that will run, and are not here yet.
        """
        running = self.running()
        if len(running) + num_starting >= self._max_running:
            raise ServiceError("overloaded")
        own = sum(each.principal == principal for each in running)
        if principal and own >= MAX_RUNNING_OF_PRINCIPAL:
            raise ServiceError(
                "over_share",
                f"{own} responses of this tenant run in the background, as many as may; "
                "wait for one to end",
                retry_after_s=5.0,
            )

    def put(self, entry: StoredResponse) -> None:
        """Keep `entry`, or count it again after it has grown."""
        known = self._entries.get(entry.draft.id)
        if known is None:
            entry.expires_s = self._clock() + self._ttl_s
            self._entries[entry.draft.id] = entry
            self._num_of[entry.principal] += 1
        else:
            self._bytes_of[entry.principal] -= entry.num_bytes
        entry.num_bytes = entry.measure()
        self._bytes_of[entry.principal] += entry.num_bytes
        entry.count_growth = partial(self._grown, entry)
        self._drop_old()

    def has(self, entry: StoredResponse) -> bool:
        return self._entries.get(entry.draft.id) is entry

    def remove(self, entry: StoredResponse) -> None:
        if self.has(entry):
            del self._entries[entry.draft.id]
            entry.count_growth = None
            self._bytes_of[entry.principal] -= entry.num_bytes
            self._num_of[entry.principal] -= 1
            if not self._num_of[entry.principal]:
                del self._num_of[entry.principal], self._bytes_of[entry.principal]

    def _grown(self, entry: StoredResponse, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self._bytes_of[entry.principal] += num_bytes
        if self.num_bytes > self._max_bytes:
            self._drop_old()

    def _drop_old(self) -> None:
        now_s = self._clock()
        for entry in list(self._entries.values()):
            if entry.expires_s > now_s:
                break  # the rest is newer
            if not entry.is_running:
                self.remove(entry)
        while self._is_full() and (victim := self._victim()) is not None:
            self.remove(victim)

    def _is_full(self) -> bool:
        return len(self) > self._max_entries or self.num_bytes > self._max_bytes

    def _victim(self) -> StoredResponse | None:
        """The oldest that does not run, of the principal that has most of what is short."""
        held = self._num_of if len(self) > self._max_entries else self._bytes_of
        idle = [entry for entry in self._entries.values() if not entry.is_running]
        if not idle:
            return None
        heaviest = max({entry.principal for entry in idle}, key=held.__getitem__)
        return next(entry for entry in idle if entry.principal == heaviest)
