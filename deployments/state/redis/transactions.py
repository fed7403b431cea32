"""The verbs by WATCH and MULTI, for a Redis that permits no functions. Each is a plan (plans.py).

They need a connection of their own, and three times the round trips: what is watched and found
must not be changed by another client before EXEC, or the plan begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.deployments.state import rules
from penstock.deployments.state.redis.plans import (
    Command,
    Keys,
    Plan,
    checked,
    milliseconds,
)
from penstock.deployments.state.store import Bucket, Expect, StateDown, StateError, Taken

MOST_TRIES = 32


def put(
    keys: Keys, name: str, value: bytes, ttl_s: float | None, expect: Expect | int
) -> Plan[int]:
    key = keys.value(name)
    for _ in range(MOST_TRIES):
        text, time = yield from _look([key], ("HGET", key, "version"), ("TIME",))
        found = None if text is None else int(text)
        try:
            rules.check_version(found, expect)
        except StateError:
            yield [("UNWATCH",)]
            raise
        version = rules.new_version(found, _seconds(time))
        commands = [("HSET", key, "body", value, "version", version), _live(key, ttl_s)]
        if (yield from _write(commands)):
            return version
    raise _busy(name)


def append(
    keys: Keys,
    name: str,
    first: int,
    records: Sequence[bytes],
    fence: int,
    ttl_s: float | None,
    keep: int | None,
) -> Plan[int]:
    stream, head = keys.stream(name), keys.head(name)
    last = f"0-{first + len(records)}"
    there: Command = ("XRANGE", stream, f"0-{first + 1}", last)
    for _ in range(MOST_TRIES):
        figures, entries = yield from _look(
            [stream, head], ("HMGET", head, "next", "fence"), there if records else ("PING",)
        )
        next, highest = (int(each or 0) for each in figures)
        try:
            num_old = rules.num_repeated(next, highest, first, len(records), fence)
            if num_old and entries:
                begin = int(entries[0][0][2:]) - 1
                old = [fields[1] for _, fields in entries]
                rules.check_repeated(begin, old, records[begin - first :])
        except StateError:
            yield [("UNWATCH",)]
            raise
        next = max(next, first + len(records))
        new = enumerate(records[num_old:], first + num_old + 1)
        commands: list[Command] = [("XADD", stream, f"0-{n}", "r", record) for n, record in new]
        if keep is not None:
            commands.append(("XTRIM", stream, "MINID", "~", f"0-{max(0, next - keep + 1)}"))
        commands.append(("HSET", head, "next", next, "fence", fence))
        commands += [_live(stream, ttl_s), _live(head, ttl_s)]
        if (yield from _write(commands)):
            return next
    raise _busy(name)


def take(keys: Keys, buckets: Sequence[Bucket]) -> Plan[Taken]:
    names = [keys.bucket(bucket.name) for bucket in buckets]
    for _ in range(MOST_TRIES):
        *found, time = yield from _look(
            names, *[("HMGET", name, "level", "at") for name in names], ("TIME",)
        )
        levels = [None if at is None else (float(level), float(at)) for level, at in found]
        now_s = _seconds(time)
        taken, left = rules.draw(buckets, levels, now_s)
        is_early = any(each is not None and each[1] > now_s for each in levels)
        if not taken.is_granted and not is_early:
            yield [("UNWATCH",)]
            return taken
        commands: list[Command] = []
        for name, bucket, (level, at_s) in zip(names, buckets, left):
            commands.append(("HSET", name, "level", repr(level), "at", repr(at_s)))
            commands.append(_live(name, rules.ttl_s(bucket, level)))
        if (yield from _write(commands)):
            return taken
    raise _busy(buckets[0].name)


def delete(keys: Keys, name: str, expect: Expect | int) -> Plan[None]:
    key = keys.value(name)
    for _ in range(MOST_TRIES):
        (text,) = yield from _look([key], ("HGET", key, "version"))
        try:
            rules.check_version(None if text is None else int(text), expect)
        except StateError:
            yield [("UNWATCH",)]
            raise
        if (yield from _write([("DEL", *keys.all(name))])):
            return
    raise _busy(name)


def _look(watched: Sequence[str], *commands: Command) -> Plan[list[Any]]:
    """Watch some keys, and read. Raises the StateError of an error among the replies."""
    replies = yield [("WATCH", *watched), *commands]
    try:
        return [checked(reply) for reply in replies][1:]
    except StateError:
        yield [("UNWATCH",)]
        raise


def _write(commands: list[Command]) -> Plan[bool]:
    """All commands, or none where a watched key was changed: False."""
    *queued, executed = yield [("MULTI",), *commands, ("EXEC",)]
    for reply in queued:
        checked(reply)
    if checked(executed) is None:
        return False
    for reply in executed:
        checked(reply)
    return True


def _live(key: str, ttl_s: float | None) -> Command:
    return ("PERSIST", key) if ttl_s is None else ("PEXPIRE", key, milliseconds(ttl_s))


def _seconds(time: Sequence[bytes]) -> float:
    return int(time[0]) + int(time[1]) / 1e6


def _busy(name: str) -> StateDown:
    return StateDown(f"other clients change {name} all the time")
