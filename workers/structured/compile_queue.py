"""The queue of requests whose grammar is being compiled, on threads next to the engine's.

Compiled and refused requests are passed to a callback. Tenants take turns: one whose grammars take
long delays its own requests.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.workers.request import Request, RequestError
from penstock.workers.structured.grammar import NUM_HELPERS, GrammarCompiler, GrammarMatcher

log = logging.getLogger("penstock.worker")

MAX_WAITING = 256
MAX_WAITING_OF_TENANT = 64  # where callers have keys


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
        # By domain of the prefix cache, which is a tenant's; the next to have a turn is the first.
        self._turns: OrderedDict[bytes, deque[Request]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_HELPERS, thread_name_prefix="penstock-grammar")

    def submit(self, request: Request) -> None:
        """Compile the grammar of `request`, then pass it to `accept`; from any thread."""
        domain = request.cache_domain
        with self._lock:
            num_of_tenant = len(self._turns.get(domain, ())) if domain else 0
            is_full = len(self._waiting) >= MAX_WAITING or num_of_tenant >= MAX_WAITING_OF_TENANT
            if not is_full:
                self._waiting.add(request.request_id)
                self._turns.setdefault(domain, deque()).append(request)
        if is_full:
            refusal = RequestError("too many grammars are waiting to compile", code="overloaded")
            self._accept(CompiledRequest(request, refusal=refusal))
        else:
            self._threads.submit(self._compile_next)

    def cancel(self, request_id: str) -> None:
        """Drop a request that is still queued; `accept` is not called for it."""
        with self._lock:
            self._waiting.discard(request_id)

    def close(self) -> None:
        """Drop queued requests, and close the compiler."""
        with self._lock:
            self._waiting.clear()
            self._turns.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._compiler.close()

    def _compile_next(self) -> None:
        """The first request of the tenant whose turn it is."""
        with self._lock:
            if not self._turns:
                return
            domain, requests = self._turns.popitem(last=False)
            request = requests.popleft()
            if requests:
                self._turns[domain] = requests  # behind the other tenants
            if request.request_id not in self._waiting:
                return
        self._compile(request)

    def _compile(self, request: Request) -> None:
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
