"""Checks of a new connection: which server it is, whether it keeps its data, and whether it has,
or can load, the functions of the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from penstock.deployments.state.redis.plans import Plan
from penstock.deployments.state.store import StateDown

FUNCTIONS = Path(__file__).with_name("functions.lua")


@dataclass(slots=True)
class Survey:
    """Facts about the connected server."""

    version: str = ""
    has_functions: bool = False
    notes: tuple[str, ...] = ()

    def ask(self) -> Plan[None]:
        """Raises StateDown for a server that cannot be used."""
        hello, memory, disk, about = yield [
            ("HELLO",),
            ("INFO", "memory"),
            ("INFO", "persistence"),
            ("FCALL", "penstock_about_1", 0),
        ]
        server = _pairs(hello)
        if server.get("mode") == "cluster":
            raise StateDown("Redis Cluster is not supported; name a single server in state_url")
        notes = [*_of_memory(_lines(memory)), *_of_disk(_lines(disk))]
        if server.get("role") in ("slave", "replica"):
            notes.append("this Redis is a replica; state_url must name the primary")
        self.has_functions = about == 1
        if isinstance(about, ResponseError) and "Function not found" in str(about):
            (loaded,) = yield [("FUNCTION", "LOAD", FUNCTIONS.read_bytes())]
            is_there = not isinstance(loaded, ResponseError) or "already exists" in str(loaded)
            self.has_functions = is_there
            about = loaded
        if not self.has_functions:
            notes.append(
                f"Redis does not take the functions of the store ({str(about)[:80]}): writes use "
                "transactions, with three times the round trips (docs/operations/state.md)"
            )
        self.version = server.get("version", "")
        self.notes = tuple(notes)


def _of_memory(figures: dict[str, str] | None) -> list[str]:
    if figures is None:
        return ["whether Redis evicts keys cannot be seen, since its ACL refuses INFO"]
    policy = figures.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return []
    return [f"Redis may evict what is stored: maxmemory-policy is {policy}; set noeviction"]


def _of_disk(figures: dict[str, str] | None) -> list[str]:
    if figures is None or figures.get("aof_enabled") != "0":
        return []
    return [
        "Redis has no append-only file: a restart of Redis loses what is stored since its last "
        "snapshot; set appendonly yes"
    ]


def _pairs(reply: Any) -> dict[str, str]:
    if not isinstance(reply, list):
        return {}
    texts = [each.decode() if isinstance(each, bytes) else str(each) for each in reply]
    return dict(zip(texts[::2], texts[1::2]))


def _lines(reply: Any) -> dict[str, str] | None:
    """The figures of INFO; None where it is not permitted."""
    if not isinstance(reply, bytes):
        return None
    pairs = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}
