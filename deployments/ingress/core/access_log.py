"""The line that the log has of each request: how it ended, and where the time went.

It never holds a word of the prompt or of the answer.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.core.generation import Generation

log = logging.getLogger("penstock.requests")


def log_request(call: Call, *, finish: str, generation: Generation | None = None) -> None:
    """One line of JSON, in which every control character is escaped."""
    if not log.isEnabledFor(logging.INFO):
        return
    request_id = call.context.request_id if generation is None else generation.request.request_id
    line: dict[str, Any] = {"id": request_id, "front": call.context.front, "finish": finish}
    if call.context.client_id is not None:
        line["client_id"] = call.context.client_id
    if generation is not None:
        timings = generation.times.timings(time.monotonic())
        line |= {
            "prompt_tokens": generation.usage.prompt_tokens,
            "cached_tokens": generation.usage.cached_tokens,
            "completion_tokens": generation.usage.completion_tokens,
            "ttft_s": _rounded(timings.first_token_s),
            "queue_s": _rounded(timings.queue_s),
            "prefill_s": _rounded(timings.prefill_s),
            "decode_s": _rounded(timings.decode_s),
            "total_s": _rounded(timings.total_s),
        }
    log.info("%s", json.dumps(line))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
