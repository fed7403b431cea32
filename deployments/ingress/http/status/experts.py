"""`POST /v1/penstock/experts/reload`: the expert stores read the model's experts again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.openai.schemas import ErrorBody
from penstock.workers.errors import StoreUnavailable
from penstock.workers.request import STORE_UNAVAILABLE

log = logging.getLogger("penstock.ingress")


class Reloaded(Protocol):
    """A store that has written its file anew."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def num_experts(self) -> int: ...


ReloadStores = Callable[[], Awaitable[Sequence[Reloaded]]]


class StoreBody(BaseModel):
    """An expert store after its reload; workers change to this epoch within a second or two."""

    name: str
    epoch: int
    num_experts: int


class ReloadBody(BaseModel):
    stores: list[StoreBody]  # none: no model keeps its experts in a store


def add_reload_route(app: FastAPI, reload_stores: ReloadStores | None) -> None:
    """`reload_stores` None: there is no cluster whose stores could be asked."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (401, 403, 503)
    }

    @app.post("/v1/penstock/experts/reload", response_model=ReloadBody, responses=refusals)
    async def reload() -> ReloadBody:
        """Have all expert stores write their files anew from the checkpoint, and wait until they
        have. Requests go on meanwhile, with the experts that workers have. With API keys: for the
        role admin."""
        try:
            stores = [] if reload_stores is None else await reload_stores()
        except StoreUnavailable as error:
            log.error("%s", error)
            raise ServiceError(STORE_UNAVAILABLE) from None
        return ReloadBody(
            stores=[
                StoreBody(name=each.name, epoch=each.epoch, num_experts=each.num_experts)
                for each in stores
            ]
        )
