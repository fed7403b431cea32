"""Real listeners over the real core for tests: uvicorn and grpc.aio on ports of their own.

`EngineBackend` is a TokenBackend over an engine in this process. `ScriptedBackend` does what an
engine cannot be made to do: pauses, failures, and tokens in given groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import numpy as np
import pytest
import torch
import uvicorn

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport
from penstock.deployments.ingress.core.billing import Billing
from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.bounds.limits import OpenCalls
from penstock.deployments.ingress.core.call import Call, TextDelta
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.tracing import Tracer
from penstock.deployments.ingress.grpc.server import start_server
from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.in_process import batch_executor
from penstock.deployments.ingress.http.listener.hosts import AllowedHosts
from penstock.deployments.ingress.http.listener.protocol import bounded_protocol
from penstock.deployments.ingress.http.listener.tls import TlsServer
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.options import StateOptions
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.security.key_file import read_key_file
from penstock.deployments.security.quotas import QuotaLimiter
from penstock.deployments.security.records import KeyRecord
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.factory import open_store
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, FinishReason, Request, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.structured.grammar import GrammarCompiler
from penstock.workers.text.pair_template import PairTemplate
from penstock.workers.text.reasoning import Marks
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

MODEL = "builtin"
T = TypeVar("T")


@functools.cache
def model() -> Any:
    torch.set_num_threads(1)
    return load_model(resolve_model(MODEL), weights="fp32", progress=False)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(MODEL))


def new_engine() -> Engine:
    return Engine(EngineConfig(num_blocks=512, max_num_seqs=16), model())


def reference_ids(prompt_ids: Sequence[int], **params: Any) -> list[int]:
    """What the engine gives for one request alone, without any of the front ends."""
    engine = new_engine()
    engine.add(Request("alone", tuple(prompt_ids), SamplingParams(**params)))
    token_ids: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            token_ids += delta.token_ids
    return token_ids


class EngineBackend:
    """The real engine on its own thread."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or new_engine()
        self.is_ready = True
        grammars = GrammarCompiler(
            lambda: tokenizer().to_json(),
            vocab_size=model().config.vocab_size,
            eos_token_ids=model().config.eos_token_ids,
        )
        self._thread = EngineThread(self.engine, self._deliver, num_threads=1, grammars=grammars)
        self._queues: dict[str, asyncio.Queue[Delta]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread.start()

    def ready(self) -> bool:
        return self.is_ready and self._thread.alive

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        request = admission.request
        self._loop = asyncio.get_running_loop()
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._thread.submit(request)
        finished = False
        try:
            while not finished:
                delta = await queue.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._queues[request.request_id]
            if not finished:
                self._thread.cancel(request.request_id)

    def stop(self) -> None:
        self._thread.stop()

    @property
    def num_live_blocks(self) -> int:
        return self.engine.pool.num_live

    def _deliver(self, deltas: list[Delta]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the client has gone
            self._loop.call_soon_threadsafe(self._hand_out, deltas)

    def _hand_out(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                queue.put_nowait(delta)


Step = Sequence[int] | float | Exception | str | FinishReason


VECTOR = np.array([3.0, 0.0, 4.0, 0.0], dtype="<f4").tobytes()


class ScriptedBackend:
    """Plays a script for every request: ids are a delta, a number is a pause in seconds, a text is
    the code of an error delta, a finish reason ends the answer, an exception is raised. What is
    embedded gets VECTOR, and no ids."""

    def __init__(self, *script: Step):
        self.script = script
        self.requests: list[Request] = []
        self.num_closed = 0
        self.is_ready = True

    def ready(self) -> bool:
        return self.is_ready

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        request = admission.request
        self.requests.append(request)
        request_id = request.request_id
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, FinishReason):
                    vector = VECTOR if request.embeds else b""
                    yield Delta(request_id, [], step, embedding=vector)
                elif isinstance(step, str):
                    yield Delta(request_id, [], FinishReason.ERROR, error=step)
                elif isinstance(step, int | float):
                    await asyncio.sleep(step)
                elif not request.embeds:
                    yield Delta(request_id, list(step))
        finally:
            self.num_closed += 1


class HeldBackend(ScriptedBackend):
    """Plays its script once `may_answer` is set. `num_held`: requests that have come."""

    def __init__(self, *script: Step):
        super().__init__(*script)
        self.may_answer, self.num_held = threading.Event(), 0

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        self.num_held += 1
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        async with aclosing(super().generate(admission)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta


def slowed(engine: Engine, patch: pytest.MonkeyPatch, pause_s: float = 0.01) -> None:
    """Each step takes that much longer: what runs has not ended when a test goes on."""
    step = engine.step

    def slow_step() -> list[Delta]:
        time.sleep(pause_s)
        return step()

    patch.setattr(engine, "step", slow_step)


async def generated(core: RequestCore, call: Call) -> AsyncGenerator[TextDelta, None]:
    """The pieces of one call, validated and run."""
    generation = await core.prepare(call)
    async with aclosing(core.run(generation)) as pieces:
        async for _, piece in pieces:
            yield piece


def core_over(
    backend: Any,
    *,
    max_model_len: int = 512,
    of: Tokenizer | None = None,
    marks: Marks | None = None,
    tools: ToolSupport | None = None,
    longest_wait_s: float | None = None,
    open_calls: OpenCalls | None = None,
    shares_prefixes: bool = False,
    other_names: tuple[str, ...] = (),
    sampling_defaults: SamplingDefaults | None = None,
    pairs: PairTemplate | None = None,
    tracer: Tracer | None = None,
    further: Sequence[ModelRuntime] = (),
) -> RequestCore:
    """`further`: models beside the first one."""
    return RequestCore(
        ModelRuntime(
            of or tokenizer(),
            backend,
            model_name=MODEL,
            other_names=other_names,
            vocab_size=model().config.vocab_size,
            max_model_len=max_model_len,
            marks=marks,
            tools=tools,
            longest_wait_s=longest_wait_s,
            shares_prefixes=shares_prefixes,
            sampling_defaults=sampling_defaults,
            pairs=pairs,
        ),
        *further,
        open_calls=open_calls,
        tracer=tracer,
    )


class Serving:
    """Both front ends over one core, on an event loop of their own. A context manager."""

    def __init__(
        self,
        backend: Any,
        *,
        api_keys: Sequence[str | KeyRecord] | ApiKeys = (),
        data_dir: Path | None = None,
        state_url: str | None = None,
        name: str = "ingress",
        hosts: AllowedHosts | None = None,
        fields: FieldPolicy | None = None,
        certificates: Certificates | None = None,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        api_keys_file: Path | None = None,
        origins: Sequence[str] = (),
        metrics: Callable[[], bytes] | None = None,
        **of_core: Any,
    ):
        """`state_url`: of the store for journals; None: there are none. `name`: of this ingress in
        the store. `fields`: what is done with
        unknown fields; None: they are refused. `certificates`: for TLS;
        None: there is none. `api_keys_file`: followed while the servers run, in place of
        `api_keys`."""
        self.backend = backend
        self._state_url, self._name = state_url, name
        self._hosts = hosts
        self._fields = fields
        self._certificates = certificates
        self._origins, self._metrics = origins, metrics
        self.journals: Journals | None = None
        self.core = core_over(backend, **of_core)
        self._keys_path = None if api_keys_file is None else str(api_keys_file)
        lines: Sequence[str | KeyRecord] | ApiKeys = api_keys
        if self._keys_path is not None:
            lines = read_key_file(self._keys_path)
        self.keys = lines if isinstance(lines, ApiKeys) else ApiKeys(lines)
        self._data_dir = data_dir
        self._loop = new_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        if not self._started.wait(120):  # no assert: tests run under `python -O`, too
            raise RuntimeError("the servers did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._http.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the servers did not stop"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the servers' loop and wait for its result."""

        async def on_loop() -> Any:
            return function()

        return self.wait(on_loop())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the servers' loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        workers = getattr(self.backend, "workers", None)  # where a test wants the status route
        if self._state_url is not None:
            store = await open_store(StateOptions(state_url=self._state_url))
            self.journals = Journals(store, self._name, flush_s=0.02)
        shared = None if self.journals is None else self.journals.store
        self.core.billing = Billing(self.keys, QuotaLimiter(shared))
        app = build_app(
            self.core,
            keys=self.keys,
            journals=self.journals,
            workers=workers,
            view=getattr(self.backend, "view", None),
            has_lost=getattr(self.backend, "has_lost", None),
            data_dir=self._data_dir,
            hosts=self._hosts,
            origins=self._origins,
            metrics=self._metrics,
            fields=self._fields,
        )
        batches = None
        if self._data_dir is not None:
            board = None if self.journals is None else self.journals.batches
            executor = batch_executor(self.core, self._data_dir, self._fields, board)
            batches = asyncio.ensure_future(executor.run())
        listener = socket.create_server(("127.0.0.1", 0))
        self.http_port: int = listener.getsockname()[1]
        scheme = "http" if self._certificates is None else "https"
        self.base_url = f"{scheme}://127.0.0.1:{self.http_port}"
        errors = self.core.metrics.num_errors_returned
        connections = Connections(1024)
        protocol = bounded_protocol(connections, errors)
        config = uvicorn.Config(app, http=protocol, ws="none", log_config=None, lifespan="off")
        if self._certificates is None:
            self._http = uvicorn.Server(config)
        else:
            self._http = TlsServer(config, self._certificates.server_context, connections)
        grpc_server = await start_server(
            self.core,
            "127.0.0.1:0",
            keys=self.keys,
            journals=self.journals,
            certificates=self._certificates,
        )
        self.grpc_target = f"127.0.0.1:{grpc_server.port}"
        self._http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        while not self._http.started:
            await asyncio.sleep(0.01)
        watch = KeyFileWatch(
            self.keys, self._keys_path, lambda: self.core.end_calls(self.keys.ended), look_s=0.05
        )
        following = asyncio.ensure_future(watch.run())
        self._started.set()
        await serving
        following.cancel()
        if batches is not None:
            batches.cancel()
            await asyncio.gather(batches, return_exceptions=True)
        await grpc_server.stop(0)
        if self.journals is not None:
            await self.journals.close()


@contextlib.contextmanager
def engine_serving(**options: Any) -> Iterator[Serving]:
    """Servers over the real engine. `options`: as for Serving."""
    backend = EngineBackend()
    with Serving(backend, **options) as servers:
        yield servers
    backend.stop()


@contextlib.contextmanager
def scripted(*script: Step, **options: Any) -> Iterator[tuple[Serving, httpx.Client]]:
    """Servers over a script, and a plain client for them."""
    with (
        Serving(ScriptedBackend(*script), **options) as servers,
        httpx.Client(base_url=servers.base_url, timeout=30) as plain,
    ):
        yield servers, plain


class ScriptedGrpc:
    """A server over a script, and a stub for it. A context manager."""

    def __init__(self, stub_type: Callable[[grpc.Channel], Any], *script: Step, **options: Any):
        self.backend = ScriptedBackend(*script)
        self._serving = Serving(self.backend, **options)
        self._stub_type = stub_type

    def __enter__(self) -> ScriptedGrpc:
        self._serving.__enter__()
        self.channel = grpc.insecure_channel(self._serving.grpc_target)
        self.stub = self._stub_type(self.channel)
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()
        self._serving.__exit__(*error)
