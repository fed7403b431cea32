"""Has all workers of a model load or drop a LoRA adapter, and waits until they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from ray.exceptions import RayError

from penstock.deployments.supervision.registry import RegistryClient
from penstock.workers.stats import WorkerInfo

WAIT_S = 120.0  # longest that the workers may take
LOOK_S = 0.1


class AdapterRefused(ValueError):
    """A worker could not load the adapter, and says why: the caller's business."""


class AdapterTimeout(Exception):
    """Not all workers have answered; those that do later make the change all the same."""


class AdapterControl:
    """The adapters of the models of one application."""

    def __init__(
        self, app_name: str, configured: Mapping[str, Mapping[str, str]], *, has_key: bool
    ):
        """`configured`: by model, the folders of adapters that its workers load at their start, by
        name. `has_key`: there are several models, each with workers under its name."""
        self._registry, self._has_key = RegistryClient(app_name), has_key
        self._configured = configured

    async def load(self, model: str, name: str, folder: str) -> None:
        """All workers of `model` have the adapter in `folder` as `name` afterwards; or, where one
        cannot load it, what they had before.

        Raises AdapterRefused or AdapterTimeout.
        """
        before = await self._folder(model, name)
        number = await self._change(model, name, folder)
        workers = await self._all_have_made(model, number)
        failures = [why for each in workers for of, why in each.adapter_failures if of == number]
        if failures:
            await self._all_have_made(model, await self._change(model, name, before))
            raise AdapterRefused(failures[0])

    async def unload(self, model: str, name: str) -> None:
        """No worker of `model` begins requests with it afterwards. Raises AdapterTimeout."""
        await self._all_have_made(model, await self._change(model, name, None))

    async def names(self, model: str) -> tuple[str, ...]:
        """The adapters that all its workers have now."""
        of_each = [set(each.adapters) for each in await self._workers(model)]
        return tuple(sorted(set.intersection(*of_each))) if of_each else ()

    async def _folder(self, model: str, name: str) -> str | None:
        """Of the adapter that now has this name; None: there is none."""
        try:
            changes = await self._registry.adapter_changes(model)
        except (RayError, TimeoutError, ValueError) as error:
            raise AdapterTimeout(f"the registry gives no answer: {error}") from None
        for each in changes:
            if each.name == name:
                return each.folder
        return self._configured.get(model, {}).get(name)

    async def _change(self, model: str, name: str, folder: str | None) -> int:
        try:
            return await self._registry.change_adapter(model, name, folder)
        except (RayError, TimeoutError, ValueError) as error:
            raise AdapterTimeout(f"the registry gives no answer: {error}") from None

    async def _all_have_made(self, model: str, number: int) -> list[WorkerInfo]:
        ends_s = time.monotonic() + WAIT_S
        while time.monotonic() < ends_s:
            workers = await self._workers(model)
            if workers and all(each.adapter_change >= number for each in workers):
                return workers
            await asyncio.sleep(LOOK_S)
        raise AdapterTimeout("not all workers have answered")

    async def _workers(self, model: str) -> list[WorkerInfo]:
        try:
            view = await self._registry.view()
        except (RayError, TimeoutError, ValueError):
            return []
        return [
            info
            for info, _ in view.workers
            if not info.is_draining and (info.model == model or not self._has_key)
        ]
