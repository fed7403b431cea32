"""The commands of each verb: generators that yield commands and are sent the replies.

A plan opens no connection: link.py runs it. A reply that is an error comes as a value.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError

from penstock.deployments.state.store import (
    ANY,
    Bucket,
    Conflict,
    Expect,
    Fenced,
    Gap,
    Slice,
    StateDown,
    StateError,
    StateFull,
    Taken,
    Versioned,
)

T = TypeVar("T")
Command = tuple[Any, ...]
Plan = Generator[list[Command], list[Any], T]


class Refused(StateDown):
    """The server answers, and refuses a command: its ACL forbids it, say."""


class Stale(StateDown):
    """This connection cannot be used any more: another server, or missing functions."""


class Keys:
    """The keys of a name in Redis, which share the prefix of the settings."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def value(self, name: str) -> str:
        return f"{self._prefix}v:{name}"

    def stream(self, name: str) -> str:
        return f"{self._prefix}s:{name}"

    def head(self, name: str) -> str:
        """Next index and highest fence of the stream."""
        return f"{self._prefix}h:{name}"

    def bucket(self, name: str) -> str:
        return f"{self._prefix}b:{name}"

    def all(self, name: str) -> tuple[str, str, str, str]:
        return self.value(name), self.stream(name), self.head(name), self.bucket(name)


def checked(reply: Any) -> Any:
    """The reply. Raises what it stands for, if it is an error."""
    if isinstance(reply, RedisError):
        raise failure(reply)
    return reply


def failure(error: RedisError) -> StateError:
    """A reply that is an error, as one of the store's errors."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        return StateFull("Redis has no memory left (maxmemory)")
    if text.startswith("MISCONF"):
        return StateFull("Redis refuses writes, since it cannot write its own files (MISCONF)")
    if isinstance(error, ReadOnlyError):
        return Stale("this Redis is a read-only replica; state_url must name the primary")
    if "Function not found" in text:
        return Stale("the functions of the store have vanished from Redis")
    return Refused(f"Redis refuses a command: {text[:200]}")


def expected(expect: Expect | int) -> str:
    return expect.value if isinstance(expect, Expect) else str(expect)


def milliseconds(ttl_s: float | None) -> str | int:
    return "" if ttl_s is None else max(1, round(ttl_s * 1000))


def get(keys: Keys, name: str) -> Plan[Versioned | None]:
    body, version = checked((yield [("HMGET", keys.value(name), "body", "version")])[0])
    return None if version is None else Versioned(body, int(version))


def read(keys: Keys, name: str, start: int, limit: int) -> Plan[Slice]:
    command = ("XRANGE", keys.stream(name), f"0-{start + 1}", "+", "COUNT", limit)
    return as_slice(checked((yield [command])[0]), start)


def wait(keys: Keys, name: str, start: int, limit: int, block_ms: int) -> Plan[Slice]:
    """For a connection of its own: the server answers when there is a record, or after a while."""
    command = (
        *("XREAD", "COUNT", limit, "BLOCK", block_ms, "STREAMS"),
        *(keys.stream(name), f"0-{start}"),
    )
    found = checked((yield [command])[0])
    return as_slice(found[0][1] if found else [], start)


def as_slice(entries: Sequence[Any], start: int) -> Slice:
    """Entries of a stream: id 0-(n+1), fields [r, record]."""
    first = int(entries[0][0][2:]) - 1 if entries else start
    return Slice(first, tuple(fields[1] for _, fields in entries))


def put(
    keys: Keys, name: str, value: bytes, ttl_s: float | None, expect: Expect | int
) -> Plan[int]:
    call = ("FCALL", "penstock_put_1", 1, keys.value(name))
    reply = yield [(*call, value, milliseconds(ttl_s), expected(expect))]
    return int(_outcome(reply[0]))


def append(
    keys: Keys,
    name: str,
    first: int,
    records: Sequence[bytes],
    fence: int,
    ttl_s: float | None,
    keep: int | None,
) -> Plan[int]:
    call = ("FCALL", "penstock_append_1", 2, keys.stream(name), keys.head(name))
    kept = "" if keep is None else keep
    reply = yield [(*call, first, fence, milliseconds(ttl_s), kept, *records)]
    return int(_outcome(reply[0]))


def take(keys: Keys, buckets: Sequence[Bucket]) -> Plan[Taken]:
    names = [keys.bucket(bucket.name) for bucket in buckets]
    numbers = [
        repr(float(number))
        for bucket in buckets
        for number in (bucket.capacity, bucket.refill_per_s, bucket.cost)
    ]
    commands: list[Command] = [("FCALL", "penstock_take_1", len(names), *names, *numbers)]
    commands += [  # the function keeps what does not fill
        ("PEXPIRE", name, milliseconds(bucket.ttl_s))
        for name, bucket in zip(names, buckets)
        if bucket.refill_per_s == 0 and bucket.ttl_s is not None
    ]
    taken, *expiries = yield commands
    for each in expiries:
        checked(each)
    wait_s, *levels = map(float, checked(taken))
    return Taken(wait_s == 0, wait_s, tuple(levels))


def delete(keys: Keys, name: str, expect: Expect | int) -> Plan[None]:
    if expect is ANY:
        checked((yield [("DEL", *keys.all(name))])[0])
        return
    call = ("FCALL", "penstock_delete_1", 4, *keys.all(name), expected(expect))
    _outcome((yield [call])[0])


def _outcome(reply: Any) -> bytes:
    """The figure that a function returns. Raises Gap, Fenced or Conflict."""
    kind, figure = checked(reply)
    if kind == b"gap":
        raise Gap(int(figure))
    if kind == b"fenced":
        raise Fenced(int(figure))
    if kind == b"differs":
        raise Conflict(f"record {int(figure)} of the stream is another one")
    if kind == b"conflict":
        there = f"version {int(figure)} is there" if figure else "there is no value"
        raise Conflict(f"{there}, and another one was expected")
    result: bytes = figure
    return result
