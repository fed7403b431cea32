"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import read_json_body
from penstock.deployments.ingress.http.body import json_object, validated
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.workers.option_groups.adapter_names import NAME_RULE, is_name
from penstock.workers.request import RequestError

log = logging.getLogger("penstock.ingress")


class LoraControl(Protocol):
    """Has the workers of a model change their adapters."""

    async def load(self, model: str, name: str, folder: str) -> None: ...
    async def unload(self, model: str, name: str) -> None: ...
    async def names(self, model: str) -> tuple[str, ...]: ...


class LoadAdapterRequest(BaseModel):
    """An adapter that peft has saved, in a folder that each machine with workers has."""

    lora_name: str = Field(description=f"its name as a model: {NAME_RULE}")
    lora_path: str = Field(description="its folder")
    load_inplace: bool = Field(False, description="replace an adapter of that name")
    base_model_name: str | None = Field(
        None, description="of several models, that whose adapter it is; default: the first"
    )


class UnloadAdapterRequest(BaseModel):
    """An adapter that no further request gets; requests that run end with it."""

    lora_name: str = Field(description="its name")


class AdapterAnswer(BaseModel):
    """The adapters of the model now, by name."""

    model: str
    adapters: list[str]


SCHEMAS: list[type[BaseModel]] = [LoadAdapterRequest, UnloadAdapterRequest]
_REFUSALS = error_responses(400, 401, 404, 413, 415, 503)


def add_adapter_routes(app: FastAPI, core: RequestCore, control: LoraControl | None) -> None:
    """`control` None: there is no cluster whose workers could be asked."""

    @app.post(
        "/v1/load_lora_adapter",
        response_model=AdapterAnswer,
        responses=_REFUSALS,
        openapi_extra=request_schema(LoadAdapterRequest),
    )
    async def load(request: Request) -> AdapterAnswer:
        """Load a LoRA adapter on every worker of its model, and wait until all have it. With API
        keys: for the role admin."""
        values = json_object(await read_json_body(request.scope, request.receive))
        asked = validated(LoadAdapterRequest, values)
        if not is_name(asked.lora_name):
            raise RequestError(f"lora_name must have {NAME_RULE}", param="lora_name")
        if not asked.lora_path:
            raise RequestError("lora_path must name a folder", param="lora_path")
        core.model(asked.base_model_name)  # refuses a name that no model has
        runtime = core.named(asked.base_model_name)
        lora = _allowed(runtime, control)
        if asked.lora_name in runtime.served.adapters.names and not asked.load_inplace:
            raise RequestError(
                f"the adapter {asked.lora_name!r} is loaded: unload it first, or set load_inplace",
                param="lora_name",
            )
        if _is_models(core, asked.lora_name):
            raise RequestError("lora_name is the name of a model", param="lora_name")
        name, folder = asked.lora_name, asked.lora_path
        return await _changed(runtime, lora, lambda of: lora.load(of, name, folder))

    @app.post(
        "/v1/unload_lora_adapter",
        response_model=AdapterAnswer,
        responses=_REFUSALS,
        openapi_extra=request_schema(UnloadAdapterRequest),
    )
    async def unload(request: Request) -> AdapterAnswer:
        """Drop a LoRA adapter from every worker; requests that run end with it. With API keys: for
        the role admin."""
        values = json_object(await read_json_body(request.scope, request.receive))
        name = validated(UnloadAdapterRequest, values).lora_name
        if _is_models(core, name):
            raise RequestError("lora_name is the name of a model", param="lora_name")
        core.model(name)  # refuses a name that is not there
        runtime = core.named(name)
        lora = _allowed(runtime, control)
        return await _changed(runtime, lora, lambda of: lora.unload(of, name))


def _is_models(core: RequestCore, name: str) -> bool:
    return any(name in (each.name, *each.other_names) for each in core.models())


def _allowed(runtime: ModelRuntime, control: LoraControl | None) -> LoraControl:
    if control is None or not runtime.served.adapters.may_change:
        raise RequestError(
            "adapters are not loaded or dropped while this server runs: start it with "
            "--enable-lora --lora-runtime-updates, or name them in --lora-modules",
            code="not_configured",
        )
    return control


async def _changed(
    runtime: ModelRuntime, control: LoraControl, change: Callable[[str], Awaitable[None]]
) -> AdapterAnswer:
    """Make the change. The next requests of this ingress see it; those of others in a second."""
    model = runtime.served.name
    try:
        await change(model)
    except ValueError as refusal:  # a worker's words about the folder, for the administrator
        raise RequestError(str(refusal), param="lora_path") from None
    except Exception as error:
        log.error("adapters of %s: %s", model, error)
        raise ServiceError("no_worker", f"adapters of {model}: {error}") from None
    runtime.served.adapters.names = await control.names(model)
    return AdapterAnswer(model=model, adapters=list(runtime.served.adapters.names))
