"""The engine on a thread of its own: requests arrive in a queue, deltas leave once a step.

The engine thread never waits for tokenising, text or sockets: `deliver` must not block.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from penstock.workers.cpu_affinity import keep_to
from penstock.workers.engine.engine import Engine
from penstock.workers.request import Delta, FinishReason, Request, RequestError
from penstock.workers.stats import EngineStats
from penstock.workers.structured.compile_queue import CompiledRequest, GrammarCompileQueue
from penstock.workers.structured.grammar import GrammarCompiler

log = logging.getLogger("penstock.engine")

IDLE_CHECK_S = 1.0  # of idleness, after which the engine checks its invariants once
STALL_S = 5.0  # without a token, although there is work
MAX_STALL_S = 60.0
STATS_S = 0.01  # between snapshots while it runs; one takes a few percent of a fast step


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _RenewStats:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = Request | CompiledRequest | _Cancel | _RenewStats | _Stop


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
        on_accepted: Callable[[list[str]], None] | None = None,
    ):
        """`grammars`: closed by `stop`; without it, requests with `structured` are refused.

        `num_threads`: CPU threads of torch; None: torch's default. `cores`: this thread and its
        helpers run there only; None: on all allowed ones. `on_failure` is called on the engine
        thread, at most once, when the engine has failed: no request gets a delta after that.
        `on_accepted` is called there with the ids of requests before their first step.
        """
        self._engine = engine
        self._deliver = deliver
        self._num_threads = num_threads
        self._cores = cores
        self._on_failure = on_failure
        self._on_accepted = on_accepted
        self._accepted: list[str] = []  # since the last step
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._compile_queue = (
            None if grammars is None else GrammarCompileQueue(grammars, self._inbox.put)
        )
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._stats = engine.stats()
        self._last_progress_s = self._stats_s = time.monotonic()
        self._busy = False
        self._progress = 0  # tokens computed and requests ended, in all
        self._longest_step_s = 0.0  # of late
        self._failed = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand a request to the engine; from any thread."""
        if self._compile_queue is None or request.params.structured is None:
            self._inbox.put(request)
        else:
            self._compile_queue.submit(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request within one step; from any thread. It gets no further delta."""
        if self._compile_queue is not None:
            self._compile_queue.cancel(request_id)
        self._inbox.put(_Cancel(request_id))

    def renew_stats(self) -> None:
        """Have `stats` tell of what another thread has changed, also while there is no work."""
        self._inbox.put(_RenewStats())

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the current step. Requests that still run are dropped."""
        if self._compile_queue is not None:
            self._compile_queue.close()
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._engine.close()

    def stats(self) -> EngineStats:
        """A snapshot: at most STATS_S older than the last step; of now where the engine is idle.

        Other ranks of a group tell of their expert caches once a second, also after the last step.
        """
        stats = self._stats
        if stats.ranks:
            return replace(stats, experts=self._engine.model.expert_stats())
        return stats

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._failed

    @property
    def stalled_s(self) -> float:
        """Seconds since a step last computed a token, while there is work; else 0."""
        return time.monotonic() - self._last_progress_s if self._busy else 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether that is too long, by what steps took of late: requests go elsewhere."""
        return self.stalled_s > max(STALL_S, min(3.0 * self._longest_step_s, MAX_STALL_S))

    @property
    def is_stuck(self) -> bool:
        """Whether that is too long, whatever steps took: this worker must be replaced."""
        return self.stalled_s > MAX_STALL_S

    def _run(self) -> None:
        if self._cores is not None:
            keep_to(self._cores)  # before helper threads start: they inherit it
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
        """Handle all messages, run one step, deliver. False once `stop` was called."""
        engine = self._engine
        deltas: list[Delta] = []
        message = None if engine.has_work() else self._wait()
        while message is not None or not self._inbox.empty():
            message = message or self._inbox.get()
            if isinstance(message, _Stop):
                return False
            if isinstance(message, _Cancel):
                engine.abort(message.request_id)
            elif isinstance(message, _RenewStats):
                self._renew_stats()
            else:
                self._add(message, deltas)
            message = None
        has_work = engine.has_work()
        if self._accepted and self._on_accepted is not None:
            self._on_accepted(self._accepted)
        self._accepted = []
        if has_work:
            deltas += engine.step()
            self._note_progress()
        # A reader that sees a request end must find it counted; other tokens do not wait for stats.
        if any(delta.finish_reason is not None for delta in deltas):
            self._renew_stats()
        if deltas:
            self._deliver(deltas)
        if time.monotonic() - self._stats_s >= STATS_S:
            self._renew_stats()
        if has_work:
            engine.mark_delivered()
        return True

    def _note_progress(self) -> None:
        """A step has ended: it is progress if it computed tokens, or ended a request."""
        totals, now_s = self._engine.totals, time.monotonic()
        progress = totals.num_prompt_tokens + totals.num_generated_tokens
        progress += sum(totals.num_finished.values())
        if progress != self._progress:
            step_s = now_s - self._last_progress_s
            self._longest_step_s = max(0.99 * self._longest_step_s, step_s)
            self._progress, self._last_progress_s = progress, now_s

    def _renew_stats(self) -> None:
        self._stats, self._stats_s = self._engine.stats(), time.monotonic()

    def _wait(self) -> _Message:
        """Block until a message arrives; after an idle second, check the engine's invariants."""
        self._busy = False
        self._renew_stats()
        try:
            message = self._inbox.get(timeout=IDLE_CHECK_S)
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
            self._accepted.append(request.request_id)
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
            log.exception("request %s could not be added", request.request_id)
            deltas.append(Delta(request.request_id, [], FinishReason.ERROR, error="internal_error"))
