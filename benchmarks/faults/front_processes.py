"""An ingress and a gate as processes of their own, without Ray: what they need comes by a pipe.

The ingress is that of a cluster (`open_listeners`: HTTP, gRPC, metrics, journals, batches) over a
worker pool. Instead of the registry, the run says which workers there are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.faults.child import Child, answer
from penstock.deployments.config import ServeConfig
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.ingress import garbage
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.listeners import Listeners, open_listeners
from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.stats import WorkerInfo

ANSWER_S = 0.2  # of the gate: as where workers compute on the CPUs


@dataclass
class IngressParts:
    """What lives in an ingress process."""

    config: ServeConfig
    pool: WorkerPool
    listeners: Listeners
    loop: asyncio.AbstractEventLoop
    gate: GateClient | None
    gate_address: GateAddress | None


class IngressProcess(Child[IngressParts]):
    """One ingress, serving. Raises EOFError if it does not start.

    SIGTERM: it drains as a replica does, and exits with status 0.
    """

    def __init__(
        self,
        config: ServeConfig,
        workers: Sequence[WorkerInfo],
        gate: GateAddress | None = None,
        prepare: Callable[[IngressParts], None] | None = None,
    ):
        super().__init__(_serve_ingress, config, tuple(workers), gate, prepare)
        self.url = f"http://127.0.0.1:{config.http_port}"
        self.target = f"127.0.0.1:{config.grpc_port}"

    def publish(self, workers: Sequence[WorkerInfo]) -> None:
        """What the registry would tell the pool."""
        self.ask(partial(_update, tuple(workers)))

    def find_gate(self, address: GateAddress) -> None:
        """Where the gate is from now on, as its actor would answer."""
        self.ask(partial(_find_gate, address))


class GateProcess(Child[GateServer]):
    """One gate. `address`: for ingresses."""

    def __init__(self, setup: GateSetup):
        super().__init__(_serve_gate, setup)
        self.address: GateAddress = self.greeting


def on_loop(parts: IngressParts, function: Callable[[], Any]) -> Any:
    """Run `function` on the ingress's event loop."""

    async def call() -> Any:
        return function()

    return asyncio.run_coroutine_threadsafe(call(), parts.loop).result(60)


def _update(workers: tuple[WorkerInfo, ...], parts: IngressParts) -> None:
    on_loop(parts, lambda: parts.pool.update(workers))


def _find_gate(address: GateAddress, parts: IngressParts) -> None:
    parts.gate_address = address


def _serve_ingress(
    pipe: Connection,
    config: ServeConfig,
    workers: Sequence[WorkerInfo],
    gate: GateAddress | None,
    prepare: Callable[[IngressParts], None] | None,
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a replica of Ray
        runner.run(_run_ingress(pipe, config, workers, gate, prepare))
    os._exit(0)


async def _run_ingress(
    pipe: Connection,
    config: ServeConfig,
    workers: Sequence[WorkerInfo],
    gate: GateAddress | None,
    prepare: Callable[[IngressParts], None] | None,
) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    name, found = f"process-{os.getpid()}", [gate]
    client: GateClient | None = None
    if gate is not None:

        async def where() -> GateAddress:
            assert parts.gate_address is not None
            return parts.gate_address

        client = GateClient(name, where, answer_s=ANSWER_S)
    pool = WorkerPool(
        name, client, lost_wait_s=config.lost_wait_s, longest_wait_s=config.longest_wait_s
    )
    listeners = await open_listeners(
        config, [IngressModel(config, pool, client)], ClusterView, name
    )
    parts = IngressParts(config, pool, listeners, loop, client, found[0])
    asking = None if client is None else asyncio.ensure_future(client.run())
    pool.update(workers)
    while pool.num_connected < len(workers) or not listeners.http.started:
        await asyncio.sleep(0.005)
    if prepare is not None:
        prepare(parts)
    collecting = garbage.begin(lambda: listeners.core.open_calls.num)
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    threading.Thread(target=_answer, args=(pipe, parts), daemon=True).start()
    await stopping.wait()
    collecting.cancel()
    await listeners.close(config.drain_notice_s, config.drain_s)
    await pool.close()
    if asking is not None:
        asking.cancel()
    if listeners.metrics is not None:
        await asyncio.to_thread(listeners.metrics.close)


def _answer(pipe: Connection, parts: Any) -> None:

    pipe.send(os.getpid())
    answer(pipe, parts)


def _serve_gate(pipe: Connection, setup: GateSetup) -> None:
    asyncio.run(_run_gate(pipe, setup))


async def _run_gate(pipe: Connection, setup: GateSetup) -> None:
    server = GateServer(setup)
    address = await server.where(setup)
    pipe.send(address)

    await asyncio.to_thread(answer, pipe, server)
