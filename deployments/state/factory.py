"""`open_store`: the store that the settings name."""

from __future__ import annotations

import logging

from penstock.deployments.options import StateOptions
from penstock.deployments.state.embedded.store import EmbeddedStore
from penstock.deployments.state.store import Store
from penstock.deployments.state.url import EmbeddedAddress, parse

log = logging.getLogger("penstock.state")


async def open_store(options: StateOptions) -> Store:
    """Open it on this event loop; the caller closes it.

    A Redis that cannot be reached is no error: calls raise StateDown until it can be. Raises
    ConfigError for settings, a folder or a password file that cannot be used.
    """
    address = parse(options)
    store: Store
    if isinstance(address, EmbeddedAddress):
        store = await EmbeddedStore.open(address.folder)
    else:
        from penstock.deployments.state.redis.store import RedisStore  # and Redis's client with it

        store = await RedisStore.open(address)
    for note in store.status().notes:
        log.warning("%s", note)
    return store
