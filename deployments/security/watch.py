"""Follows the file of keys while the server runs: new keys count, and revoked ones end.

The file is looked at twice a second, off the event loop, and read when it was replaced or changed.
A file that cannot be used is logged, and the last good one stays in force.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.key_file import read_key_file
from penstock.deployments.security.records import KeyRecord
from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.security")

LOOK_S = 0.5

Check = Callable[[Sequence[KeyRecord]], None]
_Stamp = tuple[int, int, int, int] | None


def accept_all(_: Sequence[KeyRecord]) -> None:
    """No key is refused."""


class KeyFileWatch:
    """Keeps `keys` as the file says. Lives on their event loop."""

    def __init__(
        self,
        keys: ApiKeys,
        path: str | None,
        on_look: Callable[[], None],
        *,
        check: Check = accept_all,
        look_s: float = LOOK_S,
    ):
        """`path` None: there is no file, and nothing to do. `on_look`: called after each look, also
        where nothing has changed, since keys expire. `check`: raises ConfigError for keys that this
        server cannot serve."""
        self._keys, self._path, self._on_look = keys, path, on_look
        self._check, self._look_s = check, look_s
        self._seen: _Stamp = None  # the first look reads it
        self.complaint = ""  # why the file cannot be used; empty: it can

    async def run(self) -> None:
        """For ever."""
        while self._path is not None:
            await asyncio.sleep(self._look_s)
            try:
                await self.look()
            except Exception:  # keys have to be followed, whatever happens
                log.exception("the look at api_keys_file failed")

    async def look(self) -> None:
        """Read the file if it has changed."""
        assert self._path is not None
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp != self._seen:
            await self._read(self._path, stamp)
        self._on_look()

    async def _read(self, path: str, stamp: _Stamp) -> None:
        try:
            records = await asyncio.to_thread(read_key_file, path)
            self._check(records)
        except ConfigError as error:
            # Without a stamp it is read again: it may be half written, or between two names.
            if str(error) != self.complaint:
                self.complaint = str(error)
                log.error("the last good keys stay in force: %s", error)
            return
        self._seen, self.complaint = stamp, ""
        if records != self._keys.records:
            self._keys.replace(records)
            log.info("api_keys_file %s was read again: %d keys", path, len(records))


def _stamp(path: str) -> _Stamp:
    """Changes when the file does; None: there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
