"""The HTTP app: its routes, the paths that need no key, and the service's own paths.

Each API has its folder or file. The request core handles requests, and EdgeMiddleware answers
errors.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.http import jobs as job_reports
from penstock.deployments.ingress.http import tokenize
from penstock.deployments.ingress.http.anthropic import routes as anthropic
from penstock.deployments.ingress.http.asgi import Scope
from penstock.deployments.ingress.http.batches import routes as batches
from penstock.deployments.ingress.http.embeddings import routes as embeddings
from penstock.deployments.ingress.http.events import ANTHROPIC_PATH, RESPONSES_PATH
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.jobs import JobBoard, add_job_route
from penstock.deployments.ingress.http.journalled import JournalledCalls
from penstock.deployments.ingress.http.listener.hosts import AllowedHosts
from penstock.deployments.ingress.http.middleware import EdgeMiddleware
from penstock.deployments.ingress.http.models import add_model_routes
from penstock.deployments.ingress.http.openai import routes as openai
from penstock.deployments.ingress.http.openai.answers import CHAT_PATH, COMPLETIONS_PATH
from penstock.deployments.ingress.http.openai.schemas import error_responses
from penstock.deployments.ingress.http.openapi import document_of
from penstock.deployments.ingress.http.responses import routes as responses
from penstock.deployments.ingress.http.static import (
    API_PAGE,
    API_PAGE_HEADERS,
    add_console_routes,
)
from penstock.deployments.ingress.http.status import adapters as adapter_routes
from penstock.deployments.ingress.http.status.adapters import LoraControl, add_adapter_routes
from penstock.deployments.ingress.http.status.cluster import (
    HasLost,
    View,
    Workers,
    add_status_route,
)
from penstock.deployments.ingress.http.status.experts import ReloadStores, add_reload_route
from penstock.deployments.ingress.http.status.queue import add_queue_route
from penstock.deployments.ingress.http.status.request import add_request_route
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

_APIS = (openai, anthropic, responses, embeddings, tokenize, batches, job_reports, adapter_routes)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' plain text
# Of answers, beside those that every page may read.
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-client-request-id", "retry-after", "x-should-retry"),
    *("idempotent-replayed", "x-penstock-resumable", "traceresponse"),
    *(
        f"x-ratelimit-{what}-{of}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
# Paths that other servers have, and what to do instead where this one has not.
_NOT_SERVED = {
    f"{RESPONSES_PATH}/compact": "this server compacts no conversations: leave out what the next "
    "request does not need, or have the model write a summary",
    "/metrics": "metrics have a port of their own, metrics_port; with the setting api_metrics they "
    "are here, too",
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}


def build_app(
    core: RequestCore,
    *,
    keys: ApiKeys | None = None,
    workers: Workers | None = None,
    view: View | None = None,
    gate: GateClient | None = None,
    gates: Mapping[str, GateClient] | None = None,
    admission: str = "optimistic",
    data_dir: Path | None = None,
    journals: Journals | None = None,
    jobs: JobBoard | None = None,
    hosts: AllowedHosts | None = None,
    origins: Sequence[str] = (),
    metrics: Callable[[], bytes] | None = None,
    fields: FieldPolicy | None = None,
    reload_stores: ReloadStores | None = None,
    adapters: LoraControl | None = None,
    has_lost: HasLost | None = None,
) -> FastAPI:
    """The ASGI app over `core`, for uvicorn or `serve.ingress`.

    `keys`: those that are accepted, as Bearer tokens, for what roles.py says; None: every caller is
    accepted. `workers`: living ones, by their last heartbeats.
    `view`: the registry's; None: no cluster. `gate`: this ingress's client of the gate; None: no
    gate. `gates`: of several models, by name, in place of `gate`. `data_dir`: the folder of files
    and batches; None: their routes answer not_configured.
    `journals`: of streams; None: none can be continued. `jobs`: reports of batches that run
    elsewhere, where other ingresses get them, too. `hosts`: the names to which this answers; None:
    any. `origins`: of pages whose browsers may use this; "*": all. `metrics`: Prometheus' text of
    them, from any thread; None: there is no /metrics, /ping or /load.
    `fields`: what is done with fields of bodies that are not served; None: they are refused.
    `reload_stores`: has the expert stores read their experts again; None: there are
    none. `adapters`: has workers load and drop LoRA adapters; None: none can. `has_lost`: as for
    add_status_route.
    """
    calls = None if journals is None else JournalledCalls(journals)
    jobs, keys, fields = jobs or JobBoard(), keys or ApiKeys(), fields or FieldPolicy()
    app = FastAPI(
        title="Penstock",
        version=importlib.metadata.version("penstock"),
        description="Text generation, compatible with OpenAI's clients.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(
        EdgeMiddleware,
        keys=keys,
        num_errors_returned=core.metrics.num_errors_returned,
        open_calls=core.open_calls,
        turns=core.turns,
        has_route=lambda scope: _has_route(app, scope),
        fast_paths=openai.fast_paths(core, calls, fields),
        hosts=hosts,
        quota_headers=None if core.billing is None else core.billing.headers,
        tracer=core.tracer,
        generation_paths=(
            *(CHAT_PATH, COMPLETIONS_PATH, ANTHROPIC_PATH, RESPONSES_PATH),
            *embeddings.PATHS,
        ),
    )
    if origins:  # outside of all else: a preflight request has no key, and errors can be read
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_exception_handler(HTTPException, _on_http_exception)
    openai.add_openai_routes(app, core, calls, fields)
    anthropic.add_message_routes(app, core, calls, fields)
    responses.add_response_routes(app, core, calls, fields)
    embeddings.add_embedding_routes(app, core, fields)
    tokenize.add_token_routes(app, core, fields)
    batches.add_batch_routes(app, data_dir, journals)
    add_model_routes(app, core, workers)
    add_console_routes(app)
    add_job_route(app, jobs)
    add_status_route(
        app, core, workers, view, jobs, has_batches=data_dir is not None, has_lost=has_lost
    )
    if gates is None:
        gates = {} if gate is None else {core.models()[0].name: gate}
    add_queue_route(app, core, gates, admission)
    add_request_route(app, core, gates)
    add_reload_route(app, reload_stores)
    add_adapter_routes(app, core, adapters)
    _add_service_routes(app, core, view)
    if metrics is not None:
        _add_metric_routes(app, core, view, metrics)
    return app


def _add_service_routes(app: FastAPI, core: RequestCore, view: View | None) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        """Whether this process answers; says nothing of models."""
        return {"status": "ok"}

    @app.get("/ready", responses=error_responses(503))
    async def ready() -> dict[str, str]:
        """Whether to send requests here; not when no worker is ready, nor before a shutdown. Of
        several models, those without a worker are named."""
        return _readiness(core, view)

    @app.get("/health", responses=error_responses(503))
    async def health() -> dict[str, str]:
        """The same as /ready."""
        return await ready()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": app.version}

    api_page = API_PAGE.read_text()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(api_page, headers=API_PAGE_HEADERS)

    models = core.models()

    @functools.cache
    def document() -> bytes:
        bodies = [body for api in _APIS for body in api.SCHEMAS]
        return bytes(JSONResponse(document_of(app, models, bodies)).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # Made when it is first asked for: it takes longer than the rest of the app together.
        return Response(await asyncio.to_thread(document), media_type="application/json")


def _add_metric_routes(
    app: FastAPI, core: RequestCore, view: View | None, metrics: Callable[[], bytes]
) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Metrics for Prometheus: of this ingress, and of all workers."""
        text = await asyncio.to_thread(metrics)
        return Response(text, headers={"content-type": METRICS_TYPE})

    @app.get("/ping", responses=error_responses(503))
    async def ping() -> dict[str, str]:
        """The same as /ready, under the name that some platforms ask for."""
        return _readiness(core, view)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """How many requests this ingress has open, over HTTP and gRPC."""
        return {"server_load": core.open_calls.num}


def _readiness(core: RequestCore, view: View | None) -> dict[str, str]:
    """What says that requests should be sent here. Raises ServiceError if they should not: it says
    how far workers that start have got with the model."""
    if core.is_stopping:
        raise ServiceError("no_worker", "this server is about to stop: send requests elsewhere")
    is_ready, lacking = core.ready(), ", ".join(core.models_without_worker())
    if is_ready:
        return {"status": "ok", "models_without_worker": lacking} if lacking else {"status": "ok"}
    start = None if view is None else view().start
    of = f" for {lacking}" if len(core.runtimes) > 1 else ""
    if of or start is not None:
        so_far = "" if start is None else f": {start}"
        raise ServiceError("no_worker", f"no worker is ready yet{of}{so_far}")
    raise ServiceError("no_worker")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the router, too, are answered by EdgeMiddleware."""
    assert isinstance(error, HTTPException)
    code = _CODE_OF_STATUS.get(error.status_code)
    if code is None:
        raise ServiceError("internal_error")
    path, known = ascii(request.scope["path"][:100]), _paths(request)
    why = _NOT_SERVED.get(request.scope["path"])
    if why is not None and request.scope["path"] not in known:
        raise RequestError(f"there is no path {path}: {why}", code="not_found")
    near = difflib.get_close_matches(request.scope["path"][:100], known, n=1, cutoff=0.8)
    message = f"there is no path {path}" + (f"; did you mean {near[0]}?" if near else "")
    if code == "method_not_allowed":
        message = f"{path} does not accept {request.method[:20]}"
        allowed = ", ".join(sorted(_methods_of(request)))
        request.scope["state"]["error_headers"] = [(b"allow", allowed.encode())]
    raise RequestError(message, code=code)


def _paths(request: Request) -> list[str]:
    """Paths without variable parts. Clients leave /v1 out, write it twice, or end with a slash."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    return [route.path for route in routes if "{" not in route.path]


def _has_route(app: FastAPI, scope: Scope) -> bool:
    """Whether an endpoint would run for `scope`, by the router's own rules."""
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def _methods_of(request: Request) -> set[str]:
    """The methods of a path; several routes may share it, of which the router names only one.
    EdgeMiddleware answers HEAD wherever there is GET."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in matching for method in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods
