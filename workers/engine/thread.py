"""The engine on a thread of its own: requests come in by a queue, deltas go out once a step.

The engine thread never waits for tokenising, text or sockets: `deliver` must only hand over.
Knows nothing of Ray, gRPC or who asked.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from penstock.workers.cpu_affinity import keep_to
from penstock.workers.engine.engine import Engine
from penstock.workers.request import Delta, FinishReason, Request, RequestError
from penstock.workers.stats import EngineStats
from penstock.workers.structured.compile_queue import CompiledRequest, GrammarCompileQueue
from penstock.workers.structured.grammar import GrammarCompiler

log = logging.getLogger("penstock.engine")

QUIET_S = 1.0  # idle for so long, the engine checks its invariants once
STATS_S = 0.01  # while it runs; making them takes a few percent of a fast step


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = Request | CompiledRequest | _Cancel | _Stop


class EngineThread:
    """Runs `engine` until `stop`.

    `deliver` is called on the engine thread with all deltas of a step, refusals included: a refused
    request comes back as a delta with finish_reason ERROR and `error` = its catalogue code.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Delta]], None],
        *,
        num_threads: int | None = None,
        cores: Collection[int] | None = None,
        grammars: GrammarCompiler | None = None,
        on_failure: Callable[[], None] | None = None,
    ):
        """Without `grammars`, requests that want one are refused. They are closed by `stop`.

        `cores`: this thread and its helpers run there only; None: wherever they may.
        `on_failure` is called on the engine thread, at most once: no request gets a delta any more.
        """
        self._engine = engine
        self._deliver = deliver
        self._num_threads = num_threads
        self._cores = cores
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._intake = None if grammars is None else GrammarCompileQueue(grammars, self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._stats = engine.stats()
        self._last_progress_s = self._stats_s = time.monotonic()
        self._busy = False
        self._failed = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand a request to the engine; from any thread."""
        if self._intake is None or request.params.structured is None:
            self._inbox.put(request)
        else:
            self._intake.submit(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request within one step; from any thread. No delta follows for it."""
        if self._intake is not None:
            self._intake.cancel(request_id)
        self._inbox.put(_Cancel(request_id))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the step that is running. Requests in flight are dropped."""
        if self._intake is not None:
            self._intake.close()
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._engine.close()

    def stats(self) -> EngineStats:
        """As of the last step, or of at most STATS_S before it; of now where nothing runs."""
        return self._stats

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._failed

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step ended, while there is work; else 0."""
        return time.monotonic() - self._last_progress_s if self._busy else 0.0

    def _run(self) -> None:
        if self._cores is not None:
            keep_to(self._cores)  # before it has helpers, which then are kept there, too
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            while self._turn():
                pass
        except Exception:
            self._failed = True
            log.exception("the engine stopped; this worker must be replaced")
            if self._on_failure is not None:
                self._on_failure()

    def _turn(self) -> bool:
        """Take in what has arrived, run one step, hand out. False once `stop` was called."""
        engine = self._engine
        deltas: list[Delta] = []
        message = None if engine.has_work() else self._wait()
        while message is not None or not self._inbox.empty():
            message = message or self._inbox.get()
            if isinstance(message, _Stop):
                return False
            if isinstance(message, _Cancel):
                engine.abort(message.request_id)
            else:
                self._add(message, deltas)
            message = None
        steps = engine.has_work()
        if steps:
            deltas += engine.step()
        self._last_progress_s = time.monotonic()
        # Who hears that a request has ended finds it counted; no other token waits for figures.
        if any(delta.finish_reason is not None for delta in deltas):
            self._renew_stats()
        if deltas:
            self._deliver(deltas)
        if self._last_progress_s - self._stats_s >= STATS_S:
            self._renew_stats()
        if steps:
            engine.times.lap("deliver")
        return True

    def _renew_stats(self) -> None:
        self._stats, self._stats_s = self._engine.stats(), self._last_progress_s

    def _wait(self) -> _Message:
        """The next message, however long it takes. A quiet second is used to check the ledger."""
        self._busy = False
        self._renew_stats()
        try:
            message = self._inbox.get(timeout=QUIET_S)
        except queue.Empty:
            self._engine.check()
            message = self._inbox.get()
        self._last_progress_s = time.monotonic()
        self._busy = True
        return message

    def _add(self, message: Request | CompiledRequest, deltas: list[Delta]) -> None:
        compiled = message if isinstance(message, CompiledRequest) else CompiledRequest(message)
        request = compiled.request
        try:
            if compiled.refusal is not None:
                raise compiled.refusal
            self._engine.add(request, compiled.matcher)
        except RequestError as refusal:
            deltas.append(
                Delta(
                    request.request_id,
                    [],
                    FinishReason.ERROR,
                    error=refusal.code,
                    error_message=refusal.message,
                    error_param=refusal.param,
                )
            )
        except Exception:
            log.exception("request %s could not be taken in", request.request_id)
            deltas.append(Delta(request.request_id, [], FinishReason.ERROR, error="internal_error"))
