"""The queue of requests whose grammar is being compiled, on threads next to the engine's.

Compiled and refused requests are passed to a callback.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.workers.request import Request, RequestError
from penstock.workers.structured.grammar import NUM_HELPERS, GrammarCompiler, GrammarMatcher

log = logging.getLogger("penstock.worker")

MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request with its matcher, or with the error that refuses it."""

    request: Request
    matcher: GrammarMatcher | None = None
    refusal: RequestError | None = None


class GrammarCompileQueue:
    """Compiles on its own threads. `accept` is called on them, and must not block."""

    def __init__(self, compiler: GrammarCompiler, accept: Callable[[CompiledRequest], None]):
        self._compiler = compiler
        self._accept = accept
        self._lock = threading.Lock()  # of `_waiting`, and of handing over before a cancel does
        self._waiting: set[str] = set()
        self._threads = ThreadPoolExecutor(NUM_HELPERS, thread_name_prefix="penstock-grammar")

    def submit(self, request: Request) -> None:
        """Compile the grammar of `request`, then pass it to `accept`; from any thread."""
        with self._lock:
            is_full = len(self._waiting) >= MAX_WAITING
            if not is_full:
                self._waiting.add(request.request_id)
        if is_full:
            refusal = RequestError("too many grammars are waiting to compile", code="overloaded")
            self._accept(CompiledRequest(request, refusal=refusal))
        else:
            self._threads.submit(self._compile, request)

    def cancel(self, request_id: str) -> None:
        """Drop a request that is still queued; `accept` is not called for it."""
        with self._lock:
            self._waiting.discard(request_id)

    def close(self) -> None:
        """Drop queued requests, and close the compiler."""
        with self._lock:
            self._waiting.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._compiler.close()

    def _compile(self, request: Request) -> None:
        if request.request_id not in self._waiting:
            return
        spec = request.params.structured
        assert spec is not None, "the request has no grammar"
        try:
            done = CompiledRequest(request, self._compiler.matcher(spec, request.emitted_ids))
        except RequestError as refusal:
            done = CompiledRequest(request, refusal=refusal)
        except Exception:
            log.exception("the grammar of request %s failed to compile", request.request_id)
            failure = RequestError("the grammar could not be compiled", code="internal_error")
            done = CompiledRequest(request, refusal=failure)
        with self._lock:
            if request.request_id in self._waiting:
                self._waiting.discard(request.request_id)
                self._accept(done)
