"""What an ingress records of its requests: counts for the metrics, and a line in the log of each.

How many, how they ended, how long each phase took: plain counting on the event loop, well below a
microsecond a token. metrics/tables.py has the names for Prometheus. Neither the metrics nor the log
ever hold a word of the prompt or of the answer.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.deployments.ingress.core.call import CallContext, RequestTimings, TokenUsage
from penstock.workers.request import Delta, FinishReason, FirstTokenTimes
from penstock.workers.stats import Histogram

log = logging.getLogger("penstock.requests")

# All bounds that vLLM's metrics have, so that boards made for it read ours, and finer ones below:
# its shortest queue is 0.3 s.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FORGET_S = 300.0  # a worker that is gone for so long has been scraped for the last time
DISCONNECT = "disconnect"  # the client left: for the log and for `num_disconnects`
_REASONS = frozenset(reason.value for reason in FinishReason)


def token_bounds(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the longest text that the model takes."""
    bounds, decade = [], 1
    while decade <= longest:
        bounds += [step * decade for step in (1, 2, 5) if step * decade <= longest]
        decade *= 10
    return tuple(float(bound) for bound in bounds)


@dataclass(slots=True)
class RequestTimes:
    """When one request came, and when its tokens did; on time.monotonic()."""

    start_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    on_worker: FirstTokenTimes | None = None
    engine: str = ""
    counts: EngineCounts | None = None  # once it has a token: where it is counted

    def timings(self, now_s: float) -> RequestTimings:
        """The phases so far, with `now_s` as the end."""
        first_s, on_worker = self.first_token_s, self.on_worker
        return RequestTimings(
            queue_s=None if on_worker is None else on_worker.queue_s,
            prefill_s=None if on_worker is None else on_worker.prefill_s,
            first_token_s=None if first_s is None else first_s - self.start_s,
            decode_s=None if first_s is None else self.last_token_s - first_s,
            total_s=now_s - self.start_s,
        )


class EngineCounts:
    """Of the requests that one worker answered."""

    def __init__(self, longest: int):
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.token_gap = Histogram(TOKEN_GAP_BOUNDS)
        self.time_per_token = Histogram(TOKEN_GAP_BOUNDS)
        self.total = Histogram(REQUEST_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)
        self.prefill = Histogram(REQUEST_BOUNDS)
        self.decode = Histogram(REQUEST_BOUNDS)
        self.prompt_length = Histogram(token_bounds(longest))
        self.answer_length = Histogram(token_bounds(longest))
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished = {reason.value: 0 for reason in FinishReason}
        self.seen_s = 0.0


class RequestMetrics:
    """All counts of one ingress, by the address of the worker that answered ("": none did).

    Lives on one event loop; another thread may read. `clock` gives monotonic seconds.
    """

    def __init__(self, model_name: str, longest: int, clock: Callable[[], float] = time.monotonic):
        self.model_name = model_name
        self.engines: dict[str, EngineCounts] = {}
        self.num_disconnects = 0
        self.num_errors_returned: Counter[str] = Counter()  # by code of the error catalogue
        self._longest = longest
        self._clock = clock

    def count_tokens(
        self, times: RequestTimes, delta: Delta, num_tokens: int, usage: TokenUsage
    ) -> None:
        """`delta` has brought `num_tokens` > 0 tokens of the answer.

        Tokens that came together share the time since the last ones.
        """
        now_s = self._clock()
        counts = times.counts
        if counts is None:
            counts = times.counts = self._of(times.engine)
            counts.num_prompt_tokens += usage.prompt_tokens
            times.first_token_s, times.on_worker = now_s, delta.times
            counts.first_token.observe(now_s - times.start_s)
            counts.token_gap.observe(0.0, num_tokens - 1)
        else:
            counts.token_gap.observe((now_s - times.last_token_s) / num_tokens, num_tokens)
        times.last_token_s = now_s
        counts.num_generated_tokens += num_tokens

    def count_embedding(self, times: RequestTimes, delta: Delta, usage: TokenUsage) -> None:
        """`delta` has brought the embedding of a prompt, after which no token comes."""
        counts = times.counts = self._of(times.engine)
        counts.num_prompt_tokens += usage.prompt_tokens
        times.first_token_s = times.last_token_s = self._clock()
        times.on_worker = delta.times

    def count_end(self, times: RequestTimes, finish: str, usage: TokenUsage) -> None:
        """A request has ended: `finish` is a finish reason, DISCONNECT, or the code of an error."""
        counts = times.counts or self._of(times.engine)
        if finish == DISCONNECT:
            self.num_disconnects += 1
            finish = FinishReason.ABORT.value
        reason = finish if finish in _REASONS else FinishReason.ERROR.value
        counts.num_finished[reason] += 1
        if times.first_token_s is None:
            return
        timings = times.timings(self._clock())
        assert timings.decode_s is not None, "it had a token"
        counts.total.observe(timings.total_s)
        if timings.queue_s is not None and timings.prefill_s is not None:
            counts.queue.observe(timings.queue_s)
            counts.prefill.observe(timings.prefill_s)
        if usage.completion_tokens > 1:
            counts.time_per_token.observe(timings.decode_s / (usage.completion_tokens - 1))
        counts.prompt_length.observe(usage.prompt_tokens)
        if usage.completion_tokens:  # else it is an embedding
            counts.decode.observe(timings.decode_s)
            counts.answer_length.observe(usage.completion_tokens)

    def keep(self, engines: Iterable[str]) -> None:
        """These workers live: have counts for each, and forget those that are long gone."""
        now_s = self._clock()
        for engine in engines:
            self._of(engine).seen_s = now_s
        for engine, counts in list(self.engines.items()):
            if engine and counts.seen_s < now_s - FORGET_S:
                del self.engines[engine]

    def _of(self, engine: str) -> EngineCounts:
        counts = self.engines.get(engine)
        if counts is None:
            counts = self.engines[engine] = EngineCounts(self._longest)
            counts.seen_s = self._clock()
        return counts


def log_request(
    context: CallContext,
    finish: str,
    *,
    request_id: str | None = None,
    times: RequestTimes | None = None,
    usage: TokenUsage | None = None,
    is_repeated: bool = False,
) -> None:
    """One line of JSON, in which every control character is escaped.

    `finish`: as for `count_end`. `request_id` of one of several answers; None: that of the call.
    `is_repeated`: nothing was generated, an answer was sent again.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    line: dict[str, Any] = {"id": request_id or context.request_id, "front": context.front}
    line["finish"] = finish
    if is_repeated:
        line["repeated"] = True
    if context.principal:
        line["tenant"] = context.principal
    if context.key_id:
        line["key"] = context.key_id
    if context.client_id is not None:
        line["client_id"] = context.client_id
    if context.trace is not None:
        line["trace_id"] = context.trace.trace_id
    if times is not None and usage is not None:
        timings = times.timings(time.monotonic())
        line |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "ttft_s": _rounded(timings.first_token_s),
            "queue_s": _rounded(timings.queue_s),
            "prefill_s": _rounded(timings.prefill_s),
            "decode_s": _rounded(timings.decode_s),
            "total_s": _rounded(timings.total_s),
        }
    log.info("%s", json.dumps(line))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
