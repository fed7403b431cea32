"""The wiring, and the only place of it: the Serve deployments of a cluster, and what each holds.

`serve run penstock.deployments.app:build_app`, `serve deploy deployments/serve.yaml` and
`penstock serve` all come through here. Ray supervises; no token passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.serve._private import constants as serve_constants
from ray.serve._private import replica as serve_replica

from penstock.deployments import grpc_ingress, http_ingress
from penstock.deployments.channel import WorkerPool
from penstock.deployments.config import ServeConfig, config_from, read_api_keys
from penstock.deployments.core import RequestCore
from penstock.deployments.expert_link import ExpertStoreClient, StoreLink, StoreSpec
from penstock.deployments.expert_remote import RemoteExperts
from penstock.deployments.gate import GateActor
from penstock.deployments.gate_client import GateClient
from penstock.deployments.gate_keeper import GateSetup
from penstock.deployments.metrics import MetricsServer, PenstockCollector
from penstock.deployments.reasoned_answers import find_marks
from penstock.deployments.registry import ClusterView, IngressInfo, RegistryClient
from penstock.workers.actor import Worker
from penstock.workers.model_config import read_limits
from penstock.workers.models.folder import resolve_model
from penstock.workers.policies import ContextSettings
from penstock.workers.stats import EngineStats, WorkerInfo
from penstock.workers.tokenizer import Tokenizer

log = logging.getLogger("penstock.app")

HEALTH_PERIOD_S = 2.0  # how soon a dead replica is replaced
HEALTH_TIMEOUT_S = 30.0
BEAT_S = 0.5
MAX_START_ATTEMPTS = 3
GATE_ANSWER_MS = 20.0
GATE_ANSWER_BESIDE_WORKERS_MS = 200.0  # who keep all cores busy; their own steps take as long
FAREWELL_S = 1.0  # after draining, for errors to reach clients
# Longer than clients and proxies keep an idle connection (httpx 5 s, most proxies 60): it must be
# they who close it, or a request meets a closed connection.
KEEP_ALIVE_S = 75
# Of an ingress: with a loop for Serve and a loop for us, gRPC would wake both for every message.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# Of a worker: OpenMP's threads wait for one another with the CPU in their hands, for up to
# milliseconds. Where somebody else wants a core, as ingress and gate do, that costs both.
SHORT_SPINS = {"GOMP_SPINCOUNT": "1000"}
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class WorkerReplica:
    """A Worker under Serve's supervision."""

    def __init__(self, config: ServeConfig, host: str | None):
        _configure_logging(config)
        _hide_serve_port()
        self._drain_s = config.drain_s
        self._registry = RegistryClient(config.app_name)
        self._store: StoreLink | None = None
        try:
            client = _store_client(config)
            manifest, far = None, None
            if client is not None:
                manifest = client.manifest()
                far = None if client.is_near() else RemoteExperts(client, manifest)
            self._worker = Worker(
                config.engine,
                model_name=config.model_name,
                host=host or ray.util.get_node_ip_address(),
                announce=self._announce,
                experts=manifest,
                far_experts=far,
            )
            if client is not None and manifest is not None:
                self._store = StoreLink(client, self._worker, manifest.epoch)
                self._store.warm()
        except Exception as error:
            self._registry.call_now("failed", _in_words("a worker", error))
            raise

    async def _announce(self, info: WorkerInfo, stats: EngineStats) -> None:
        """Tell the registry, and the expert store of this node, that this worker lives."""
        if self._store is not None and stats.experts is not None:
            await self._store.beat(info.epoch, stats.experts)
        await self._registry.worker_beat(info, stats)

    def check_health(self) -> None:
        self._worker.check_health()

    def __del__(self) -> None:
        """Serve takes this replica away: what runs here may end first."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
                self._registry.call_now("worker_left", worker.info.epoch)
            worker.stop(drain_s=self._drain_s)


@serve.ingress()
class IngressReplica:
    """What clients reach: HTTP under uvicorn, and gRPC, both on the replica's event loop.

    Serve's own HTTP route gets the same app, so that a proxy or KubeRay finds it where it looks.
    """

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, setup: GateSetup | None, _workers: Any
    ):
        """`setup`: of the gate; None: there is none. `_workers`: Serve's handle on the workers;
        being given it makes them one application."""
        _configure_logging(config)
        _hide_serve_port()
        self._config = config
        self._registry = RegistryClient(config.app_name)
        self._ingress_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._gate: GateClient | None = None
        self._asking: asyncio.Task[None] | None = None
        if setup is not None:
            actor = GateActor(config.app_name, setup)
            answer_s = (config.gate_answer_ms or GATE_ANSWER_MS) / 1000
            self._gate = GateClient(self._ingress_id, actor.where, answer_s=answer_s)
            self._asking = asyncio.ensure_future(self._gate.run())
        self._pool = WorkerPool(self._ingress_id, self._gate)
        self._is_draining = False
        self._view = ClusterView()
        self._metrics: MetricsServer | None = None
        try:
            await self._open()
        except Exception as error:
            words = _in_words("an ingress", error)
            await asyncio.to_thread(self._registry.call_now, "failed", words)
            raise
        self._beating = asyncio.ensure_future(self._beat_forever())

    async def _open(self) -> None:
        """Load the tokenizer, build the request core, and open both listeners."""
        config = self._config
        folder = await asyncio.to_thread(resolve_model, config.engine.model)
        vocab_size, max_model_len = read_limits(folder)
        tokenizer = Tokenizer.load(folder)
        max_model_len = min(max_model_len, config.engine.max_model_len or max_model_len)
        core = RequestCore(
            tokenizer,
            self._pool,
            model_name=config.model_name,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            contexts=ContextSettings.of(config.engine, max_model_len),
            marks=find_marks(config.reasoning_marks, tokenizer),
            learner=self._gate,
        )
        api_keys = read_api_keys(config.api_keys_file) if config.api_keys_file else ()
        self._asgi_app = http_ingress.build_app(
            core,
            api_keys=api_keys,
            workers=lambda: self._view.workers,
            gate=self._gate,
            admission=config.admission,
        )
        self._http = uvicorn.Server(
            uvicorn.Config(
                self._asgi_app,
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(config.drain_s + FAREWELL_S),
            )
        )
        listener = _listen(config.host, config.http_port)
        self._http_task = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        self._grpc = await grpc_ingress.start_server(
            core, config.address(config.grpc_port), api_keys=api_keys
        )

        # What is here by now stays; looking through it again and again would cost a few percent.
        gc.collect()
        gc.freeze()
        self._request_metrics = core.metrics
        if config.metrics_port:
            collector = PenstockCollector(core.metrics, lambda: self._view.workers, self._gate)
            # Not on the loop: it asks for the name of the address.
            self._metrics = await asyncio.to_thread(
                MetricsServer, collector, config.metrics_host, config.metrics_port
            )

    def __serve_build_asgi_app__(self) -> Any:
        return self._asgi_app

    async def check_health(self) -> None:
        if self._is_draining:
            return
        if self._http_task.done():
            raise RuntimeError("the HTTP listener has ended")
        if self._beating.done():
            raise RuntimeError("this ingress no longer hears of workers")

    async def _beat_forever(self) -> None:
        """Tell the registry that this ingress lives, and hear which workers do.

        While the registry is away, the workers known so far go on.
        """
        config = self._config
        while True:
            info = IngressInfo(
                ingress_id=self._ingress_id,
                pid=os.getpid(),
                http_address=config.address(config.http_port),
                grpc_address=config.address(config.grpc_port),
                num_workers=self._pool.num_connected,
                metrics_address=self._metrics.address if self._metrics is not None else "",
            )
            try:
                view = await self._registry.ingress_beat(info)
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.debug("the registry does not answer: %s", type(error).__name__)
            else:
                self._view = view
                self._pool.update(info for info, _ in view.workers)
                self._request_metrics.keep(info.address for info, _ in view.workers)
                if view.is_draining:
                    break
            await asyncio.sleep(BEAT_S)
        await self.drain()

    async def drain(self) -> None:
        """Take nothing new, and let what runs end for `drain_s`; tell the rest that it cannot."""
        if self._is_draining:
            return
        self._is_draining = True
        drain_s = self._config.drain_s
        self._http.should_exit = True
        closing = asyncio.ensure_future(self._close_pool_after(drain_s))
        await asyncio.gather(self._grpc.stop(drain_s + FAREWELL_S), self._http_task)
        closing.cancel()
        await self._pool.close()
        if self._asking is not None:
            self._asking.cancel()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            await self._registry.ingress_left(self._ingress_id)

    async def _close_pool_after(self, seconds: float) -> None:
        """Break off what still runs, so that its clients get an error, not a cut connection."""
        await asyncio.sleep(seconds)
        await self._pool.close()

    async def __del__(self) -> None:
        if hasattr(self, "_beating"):
            self._beating.cancel()
            await self.drain()


def build_app(args: Mapping[str, Any] | ServeConfig) -> Any:
    """The Serve application of `args`: a ServeConfig, or its settings by name."""
    return wire(args if isinstance(args, ServeConfig) else config_from(args))


def wire(config: ServeConfig, *, channel_host: str | None = None) -> Any:
    """The Serve application of `config`, for the cluster that this process is connected with.

    Each worker has a GPU, or its share of a node's CPUs and as many threads. Its channel listens on
    `channel_host`, or else on the address that its node has in the cluster.
    """
    resources: dict[str, Any] = {"num_gpus": 1}
    if not wants_gpus(config):
        share = _cpus_per_worker(config.num_workers)
        resources = {"num_cpus": share, "runtime_env": {"env_vars": SHORT_SPINS}}
        # Ray would allow a process as many threads as it reserved CPUs; say what is meant.
        threads = config.engine.threads or max(1, int(share))
        answer_ms = config.gate_answer_ms or GATE_ANSWER_BESIDE_WORKERS_MS
        config = replace(
            config, engine=replace(config.engine, threads=threads), gate_answer_ms=answer_ms
        )
    supervision = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": MAX_START_ATTEMPTS,
        "graceful_shutdown_timeout_s": config.drain_s + 5,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    workers = serve.deployment(
        WorkerReplica,
        name="Worker",
        num_replicas=config.num_workers,
        ray_actor_options=resources,
        **supervision,
    ).bind(config, channel_host)
    return serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=config.num_ingress,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": ONE_LOOP}},
        **supervision,
    ).bind(config, gate_setup(config, channel_host), workers)


def gate_setup(config: ServeConfig, host: str | None) -> GateSetup | None:
    """How the gate of `config` is to be; None where requests do without one."""
    if config.admission == "optimistic":
        return None
    return GateSetup(
        admission=config.admission,
        max_queued=config.max_queued,
        longest_wait_s=config.longest_wait_s,
        host=host,
        snapshot_file=config.predictor_file,
    )


def wants_gpus(config: ServeConfig) -> bool:
    """Whether each worker is to have a GPU of the cluster that we are connected with."""
    if config.engine.device != "auto":
        return config.engine.device == "cuda"
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1


def _store_client(config: ServeConfig) -> ExpertStoreClient | None:
    """The expert store of this node, where the model's experts are to come from one."""
    engine = config.engine
    if engine.expert_cache_gb is None:
        return None
    device = "cuda" if wants_gpus(config) else "cpu"
    spec = StoreSpec(
        config.app_name,
        engine.model,
        engine.weights,
        device,
        engine.expert_store_dir,
        has_twins=engine.moe_mode == "quantized",
        is_single=engine.expert_store == "one",
    )
    return ExpertStoreClient(spec)


def _cpus_per_worker(num_workers: int) -> float:
    """CPUs for each of `num_workers`, spread over the nodes: whole ones where there are enough."""
    if not ray.is_initialized():
        return 1
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    cpus = [num for num in cpus if num > 0]
    workers_per_node = -(-num_workers // max(1, len(cpus)))
    share = min(cpus, default=1) / workers_per_node
    return int(share) if share >= 1 else round(share - 0.005, 2)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that other ingress replicas on this machine can share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


def _hide_serve_port() -> None:
    """Keep the replica's own gRPC port, which Serve is about to open, on this machine.

    Serve 2.60 opens it on every interface and unpickles what anybody sends there. It is used only
    where Serve's calls go over gRPC instead of Ray, so nothing misses it.
    """
    if serve_constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        return
    add_port = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(
        server, address.replace("[::]", "127.0.0.1")
    )


def _configure_logging(config: ServeConfig) -> None:
    """Our own log lines go to stderr, which Ray keeps in a file per replica."""
    logging.basicConfig(format=LOG_FORMAT)
    logging.getLogger("penstock").setLevel(config.log_level.upper())


def _in_words(who: str, error: Exception) -> str:
    """What an operator reads of a replica that could not start."""
    kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
    return f"{who} could not start: {kind}{error}"
