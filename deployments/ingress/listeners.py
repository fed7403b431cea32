"""The listeners of one ingress: HTTP under uvicorn, gRPC, and Prometheus' metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from penstock.deployments.config import LOOPBACK, ServeConfig
from penstock.deployments.experts.reload import reload_stores
from penstock.deployments.ingress.complaints import Complaints
from penstock.deployments.ingress.core.billing import Billing
from penstock.deployments.ingress.core.bounds.connections import Connections, connections_for
from penstock.deployments.ingress.core.bounds.loop_watch import LoopWatch
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.shared_refusals import SharedRefusals
from penstock.deployments.ingress.grpc.server import GrpcServer, start_server
from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.in_process import batch_executor
from penstock.deployments.ingress.http.jobs import JobBoard
from penstock.deployments.ingress.http.listener.hosts import AllowedHosts
from penstock.deployments.ingress.http.listener.protocol import bounded_protocol
from penstock.deployments.ingress.http.listener.tls import TlsServer
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.metrics.collector import ModelSources, PenstockCollector
from penstock.deployments.ingress.metrics.probes import Probes
from penstock.deployments.ingress.metrics.server import MetricsPage, MetricsServer
from penstock.deployments.ingress.models import IngressModel, beat_all, request_core
from penstock.deployments.ingress.operator_warnings import WarningSources
from penstock.deployments.ingress.tracing.opening import open_tracer
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.certificates import Certificates, client_certificates
from penstock.deployments.security.key_file import read_key_file
from penstock.deployments.security.quotas import QuotaLimiter, check_quotas
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.embedded.folder import FolderInUse
from penstock.deployments.state.factory import open_store
from penstock.deployments.supervision.adapter_control import AdapterControl
from penstock.deployments.supervision.view import ClusterView

ERRORS_S = 1.0  # after the drain, for errors to reach clients
# Longer than clients and proxies keep an idle connection (httpx 5 s, most proxies 60 s). The client
# must close it first, or a request can meet a connection that the server is closing.
KEEP_ALIVE_S = 75
FOLDER_S = 20.0  # longest wait for the folder of the state store after a drain
FOLDER_POLL_S = 0.1

IDLE_POLL_S = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Listeners:
    """The open listeners of one ingress. `app` also serves Serve's own HTTP route."""

    app: Any  # ASGI
    http: uvicorn.Server
    http_task: asyncio.Task[None]
    grpc: GrpcServer
    metrics: MetricsServer | None  # None: metrics are off
    core: RequestCore
    batches: asyncio.Task[None] | None  # the executor; None: there is no data folder
    journals: Journals | None  # None: no state store is configured
    jobs: JobBoard
    warnings: WarningSources
    # For the probes of the metrics port; the event loop's watch; the file of keys; certificates.
    background: tuple[asyncio.Future[None], ...]

    @property
    def num_connections(self) -> int:
        """HTTP connections and running gRPC calls: a connection of HTTP/1.1 has one request at
        most, and one of gRPC has as many as its client likes."""
        return len(self.http.server_state.connections) + self.grpc.num_calls

    async def close(self, notice_s: float, drain_s: float) -> None:
        """Report "not ready", then accept no new request, then wait for running requests.

        For `notice_s` requests are still served: a load balancer sends them until it notices the
        status. Returns when all connections and all responses in the background have ended, or
        `drain_s` later: each HTTP answer that has not begun has the header `Connection: close`, and
        gRPC clients receive GOAWAY.
        """
        self.core.is_stopping = True
        if self.batches is not None:
            self.batches.cancel()  # another ingress resumes them
        await asyncio.sleep(notice_s)
        if self.journals is not None:
            await self.journals.background.hand_over()  # another ingress continues them now
        self.http.should_exit = True
        await asyncio.gather(
            self.grpc.stop(drain_s + ERRORS_S),
            self.http_task,
            self._idle(drain_s + ERRORS_S),
            self._handed_over(drain_s),
        )
        if self.journals is not None:
            await self.journals.close()
        if self.core.tracer is not None:
            await asyncio.to_thread(self.core.tracer.close)
        for task in self.background:
            task.cancel()

    async def _idle(self, within_s: float) -> None:
        """Until nothing runs: responses in the background have no connection that waits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.core.num_running:
                    await asyncio.sleep(IDLE_POLL_S)

    async def _handed_over(self, within_s: float) -> None:
        """Until the batches have ended here, so that another ingress finds their lease released."""
        if self.batches is not None:
            await asyncio.wait((self.batches,), timeout=within_s)


async def open_listeners(
    config: ServeConfig,
    models: Sequence[IngressModel],
    view: Callable[[], ClusterView],
    owner: str,
    cluster: Certificates | None = None,
) -> Listeners:
    """Load the tokenizers, build the request core, and listen for HTTP, gRPC and Prometheus.

    `config`: what all models share. `view`: the registry's last answer. `owner`: names this ingress
    in journals. `cluster`: what it shows to workers and gates. Raises ConfigError, LoadError or
    OSError.
    """
    asyncio.get_running_loop().set_exception_handler(Complaints())
    keys = await asyncio.to_thread(_api_keys, config)
    journals = await _journals(config, owner)
    store = None if journals is None else journals.store
    limiter = QuotaLimiter(store)
    tracer = await asyncio.to_thread(open_tracer, config, owner)
    core = await request_core(config, models, Billing(keys, limiter), tracer)
    if journals is not None:
        refusals = SharedRefusals(journals.store)
        for each in models:
            each.pool.lost_requests.model = each.config.key
            each.pool.lost_requests.shared = refusals
    data_dir = Path(config.data_dir) if config.data_dir else None
    jobs, fields = JobBoard(), FieldPolicy(config.unknown_fields)
    connections = connections_for(config.max_connections, config.max_connections_per_address)
    certificates = await asyncio.to_thread(client_certificates, config)
    uses = (("clients", certificates), ("cluster", cluster))
    in_use = {use: each for use, each in uses if each is not None}
    watch = LoopWatch(partial(beat_all, models))
    following = KeyFileWatch(
        keys,
        config.api_keys_file,
        lambda: core.end_calls(keys.ended),
        check=lambda records: check_quotas(records, config.max_ingress, config.state_url),
    )
    sources = [
        ModelSources(runtime.metrics, each.gate, each.pool.lost_requests)
        for runtime, each in zip(core.runtimes, models, strict=True)
    ]
    collector = PenstockCollector(
        sources[0].requests,
        lambda: view().workers,
        sources[0].gate,
        sources[0].lost,
        None if journals is None else journals.counts,
        connections,
        watch,
        in_use,
        sources[1:],
        store=None if store is None else store.status,
        keys=following if config.api_keys_file is not None else None,
    )
    app = build_app(
        core,
        keys=keys,
        workers=lambda: view().workers,
        view=view,
        gates={each.config.model_name: each.gate for each in models if each.gate is not None},
        admission=", ".join(dict.fromkeys(each.config.admission for each in models)),
        data_dir=data_dir,
        journals=journals,
        jobs=jobs,
        hosts=_allowed_hosts(config),
        origins=config.origins,
        metrics=MetricsPage(collector).text if config.api_metrics else None,
        fields=fields,
        reload_stores=partial(reload_stores, config.app_name),
        adapters=AdapterControl(
            config.app_name,
            {each.config.model_name: each.config.engine.adapter_folders for each in models},
            has_key=any(each.config.key for each in models),
        ),
        has_lost=lambda epoch: any(each.pool.has_lost(epoch) for each in models),
    )
    http = _http_server(config, app, core, connections, certificates)
    listener = _listen(config.host, config.http_port)
    http_task = asyncio.ensure_future(http.serve(sockets=[listener]))
    grpc = await start_server(
        core,
        config.address(config.grpc_port),
        keys=keys,
        journals=journals,
        certificates=certificates,
    )
    metrics, probes = None, Probes(core.ready, start=lambda: view().start)
    if config.metrics_port:
        # In a thread: it looks up the name of the address.
        metrics = await asyncio.to_thread(
            MetricsServer, collector, config.metrics_host, config.metrics_port, probes
        )
    batches = None
    if data_dir is not None:
        board = None if journals is None else journals.batches
        batches = asyncio.ensure_future(batch_executor(core, data_dir, fields, board).run())
    work = [probes.run(), watch.run(), following.run(), *(each.run() for each in in_use.values())]
    background = tuple(map(asyncio.ensure_future, work))
    return Listeners(
        *(app, http, http_task, grpc, metrics, core, batches, journals, jobs),
        WarningSources(models, store, following, in_use),
        background,
    )


def _api_keys(config: ServeConfig) -> ApiKeys:
    """The keys of the configured file. Raises ConfigError."""
    if config.api_keys_file is None:
        return ApiKeys()
    records = read_key_file(config.api_keys_file)
    check_quotas(records, config.max_ingress, config.state_url)
    return ApiKeys(records)


def _http_server(
    config: ServeConfig,
    app: Any,
    core: RequestCore,
    connections: Connections,
    certificates: Certificates | None,
) -> uvicorn.Server:
    how = uvicorn.Config(
        app,
        http=bounded_protocol(connections, core.metrics.num_errors_returned),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(config.drain_s + ERRORS_S),
    )
    if certificates is None:
        return uvicorn.Server(how)
    return TlsServer(how, certificates.server_context, connections)


def _allowed_hosts(config: ServeConfig) -> AllowedHosts | None:
    """Of a server that any web page of this machine's browsers could use; None: all names."""
    if config.api_keys_file is not None or config.host not in LOOPBACK:
        return None
    names = (name.strip() for name in (config.allowed_hosts or "").split(",") if name)
    return AllowedHosts(names, config.origins)


async def _journals(config: ServeConfig, owner: str) -> Journals | None:
    """Journals in the configured state store; None: none is. Raises ConfigError.

    An ingress that this one replaces has the folder of an embedded store until it has drained.
    """
    if config.state_url is None:
        return None
    until_s = time.monotonic() + config.drain_notice_s + config.drain_s + FOLDER_S
    while True:
        try:
            return Journals(await open_store(config), owner)
        except FolderInUse:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(FOLDER_POLL_S)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that other ingress replicas on this machine can share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener
