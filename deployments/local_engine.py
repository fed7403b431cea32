"""A request core over an engine in this process, without Ray and sockets; same answers.

Loads torch. `LocalEngine` is a TokenBackend; begin with `load_core`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.answers.reasoning import find_marks
from penstock.deployments.ingress.core.answers.tool_forms.table import support_of
from penstock.deployments.ingress.core.call import LoraNames
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.workers.context_policy import ContextSettings
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine, thread_for
from penstock.workers.pooling.scoring import pair_template
from penstock.workers.request import Delta
from penstock.workers.sampling_defaults import read_sampling_defaults
from penstock.workers.text.chat_settings import load_tokenizer
from penstock.workers.weights.model_digest import verified_folder


class LocalEngine:
    """The engine on its thread, for callers on one event loop."""

    def __init__(self, engine: Engine):
        """Made on the event loop that `generate` is called on."""
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[Delta | None]] = {}  # None: the engine has failed
        self._thread = thread_for(engine, self._deliver, self._fail)
        self._thread.start()

    def ready(self) -> bool:
        return self._thread.alive

    async def generate(self, admission: AdmissionRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish_reason. Closing the generator cancels the request."""
        request = admission.request
        queue = self._queues[request.request_id] = asyncio.Queue()
        is_finished = False
        try:
            if not self._thread.alive:
                raise ServiceError("internal_error")
            self._thread.submit(request)
            while not is_finished:
                delta = await queue.get()
                if delta is None:
                    raise ServiceError("internal_error")
                is_finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._queues[request.request_id]
            if not is_finished:
                self._thread.cancel(request.request_id)

    def stop(self) -> None:
        """Drop running requests, and free the engine."""
        self._thread.stop()

    def _deliver(self, deltas: list[Delta]) -> None:
        self._loop.call_soon_threadsafe(self._hand_out, deltas)

    def _hand_out(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if (queue := self._queues.get(delta.request_id)) is not None:
                queue.put_nowait(delta)

    def _fail(self) -> None:
        self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(None)


def load_core(config: ServeConfig) -> tuple[RequestCore, LocalEngine]:
    """The model of `config`, loaded, with a request core for it. On a running event loop.

    Raises LoadError or ConfigError.
    """
    engine = load_engine(config.engine)
    folder = verified_folder(config.engine)
    tokenizer = load_tokenizer(folder, config.engine)
    backend = LocalEngine(engine)
    runtime = ModelRuntime(
        tokenizer,
        backend,
        model_name=config.model_name,
        other_names=config.other_names,
        vocab_size=engine.model.config.vocab_size,
        max_model_len=engine.max_model_len,
        contexts=ContextSettings.of(config.engine, engine.max_model_len),
        marks=find_marks(config.reasoning_marks, tokenizer),
        tools=support_of(config.tool_call_parser, tokenizer),
        seed=config.engine.seed,
        sampling_defaults=read_sampling_defaults(folder, config.engine.generation_config),
        pairs=pair_template(folder, config.engine, tokenizer),
        adapters=LoraNames(() if engine.adapters is None else engine.adapters.names),
    )
    return RequestCore(runtime), backend
