"""Has the expert stores of an application read their experts again, on each of its nodes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from penstock.deployments.supervision.actors import NAMESPACE
from penstock.workers.errors import LoadError, StoreUnavailable
from penstock.workers.experts.expert_file import Manifest

RELOAD_S = 900.0  # longest that the stores may take: large models are read for minutes


@dataclass(frozen=True, slots=True)
class ReloadedStore:
    """A store that has written its file anew. Workers change to `epoch` at their next heartbeat."""

    name: str  # of its actor
    epoch: int
    num_experts: int


async def reload_stores(app_name: str) -> list[ReloadedStore]:
    """Reload all stores that the application has; none: it has no store.

    Raises StoreUnavailable where one cannot, or takes more than RELOAD_S; the file that its workers
    have mapped is then still good.
    """
    found = await asyncio.to_thread(list_named_actors, all_namespaces=True)
    prefix = f"{app_name}-experts-"
    names = sorted(
        each["name"]
        for each in found
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
    )
    return list(await asyncio.gather(*(_reloaded(name) for name in names)))


async def _reloaded(name: str) -> ReloadedStore:
    try:
        actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        manifest: Manifest = await asyncio.wait_for(actor.reload.remote(), RELOAD_S)
    except (RayError, ValueError, TimeoutError, LoadError, OSError) as error:
        raise StoreUnavailable(f"the expert store {name} was not reloaded: {error}") from None
    return ReloadedStore(name, manifest.epoch, manifest.num_all)
