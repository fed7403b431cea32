"""The target that requests of a batch are sent to, and what each reply means. Pure.

After a refusal (429, 503), or while the server cannot be reached, a request is sent again for as
long as the batch may take; after the loss of its worker, as retries.py says. After another failure
of the server it is sent three times in all. An error of the request itself is its result at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

MAX_ATTEMPTS = 3  # of a request that fails in the server
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MAX_RETRY_AFTER_S = 120.0
_REFUSALS = (408, 425, 429, 503)
WRONG_KEY = (401, 403)
WAITED = "deadline_exceeded"  # batches set no deadline: it has waited too long for a worker
WORKER_LOST = "worker_lost"
KILLED_WORKERS = "request_killed_workers"  # the server has found that the request ends workers


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of a server. `body` None: it is not a JSON object."""

    status: int
    body: dict[str, Any] | None
    request_id: str = ""
    retry_after_s: float | None = None

    @property
    def is_success(self) -> bool:
        return self.status == 200 and self.body is not None

    @property
    def error_code(self) -> str:
        """The code in an OpenAI error body; "" without one."""
        error = (self.body or {}).get("error")
        return str(error.get("code") or "") if isinstance(error, dict) else ""


class Unreachable(Exception):
    """No reply: the server is down, or the connection broke."""


class TargetError(RuntimeError):
    """No request can be served: the batch stops, and may be resumed. The message is for users."""


class Target(Protocol):
    """A server, or an engine in this process."""

    async def send(self, url: str, body: dict[str, Any]) -> Reply:
        """POST `body` to the path `url`. Raises Unreachable."""
        ...


class Verdict(StrEnum):
    """What to do after a reply."""

    DONE = "done"  # the reply is the result
    AGAIN = "again"  # send the request again: it was refused; fewer requests at once may help
    RETRY = "retry"  # send the request again: it failed
    LOST = "lost"  # the worker of the request was lost


def judge(reply: Reply | None, num_failures: int) -> Verdict:
    """What to do after `reply`; None: there was none. `num_failures`: earlier ones of this request.

    Raises TargetError for a refused API key, which every other request would meet too.
    """
    if reply is None:
        return Verdict.AGAIN
    if reply.status in WRONG_KEY:
        raise TargetError(
            "the server refused the API key; check --api-key-file or PENSTOCK_API_KEY, and run "
            "the same command again: finished lines are kept"
        )
    if reply.error_code == WORKER_LOST:
        return Verdict.LOST
    if reply.error_code == KILLED_WORKERS:
        return Verdict.DONE
    if reply.status in _REFUSALS or reply.error_code == WAITED:
        return Verdict.AGAIN
    if reply.status >= 500 or (reply.status == 200 and reply.body is None):
        return Verdict.RETRY if num_failures + 1 < MAX_ATTEMPTS else Verdict.DONE
    return Verdict.DONE


def cause_of(reply: Reply | None) -> str:
    """Why a request is sent again, in a few words."""
    if reply is None:
        return "server unreachable"
    return reply.error_code or f"HTTP {reply.status}"


def wait_s(reply: Reply | None, num_waits: int) -> float:
    """Seconds until a request is sent again: the server's Retry-After, else longer each time.

    Randomised, so that requests which were refused together do not return together.
    """
    retry_after_s = None if reply is None else reply.retry_after_s
    if retry_after_s is not None:
        return min(max(retry_after_s, 0.05), MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.5)
    return min(FIRST_WAIT_S * 2.0 ** min(num_waits, 10), LONGEST_WAIT_S) * random.uniform(0.5, 1.5)
