"""Calls of the OpenAI endpoints from within the process: same parser, same core, same answers.

The Target of batches that a local engine or this ingress runs. A call is an ASGI request without a
socket; `principal` is what EdgeMiddleware would derive from the API key of the caller.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from penstock.deployments.batch.executor import Board, Executor
from penstock.deployments.batch.target import Reply, TargetError
from penstock.deployments.ingress.core.billing import BATCH_PREFIX
from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import describe
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.embeddings import routes as embeddings
from penstock.deployments.ingress.http.events import RESPONSES_PATH
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.openai import routes as openai
from penstock.deployments.ingress.http.responses import routes as responses

DEFAULT_RETRY_AFTER_S = 1.0


class InProcessTarget:
    """A Target over a request core. Belongs to the core's event loop."""

    def __init__(
        self,
        core: RequestCore,
        *,
        principal: str = "",
        is_local: bool = False,
        fields: FieldPolicy | None = None,
    ):
        """`is_local`: the core's engine is in this process, too, and is not restarted. `fields`:
        what is done with fields that are not served; None: they are refused."""
        self._core = core
        self._is_local = is_local
        self._principal = principal
        self._endpoints = {
            **openai.fast_paths(core, policy=fields),
            RESPONSES_PATH: responses.fast_path(core, fields),
            **embeddings.fast_paths(core, fields),
        }

    async def send(self, url: str, body: dict[str, Any]) -> Reply:
        """POST `body` to `url`, one of batch/lines.ENDPOINTS. Cancelling drops the request.

        Raises TargetError if the engine in this process has failed.
        """
        request_id = new_request_id()
        scope = {
            "type": "http",
            "method": "POST",
            "path": url,
            "headers": [(b"content-type", b"application/json")],
            "state": {
                "request_id": request_id,
                "client_id": None,
                "principal": self._principal,
            },
        }
        exchange = _Exchange(json.dumps(body).encode())
        try:
            await self._endpoints[url](scope, exchange.receive, exchange.send)
        except Exception as error:
            if self._is_local and not self._core.ready():
                raise TargetError(
                    "the engine has failed, and the log has the cause; run the same command again: "
                    "finished lines are kept"
                ) from error
            failure = describe(error, request_id, self._core.metrics.num_errors_returned)
            retry_after_s = failure.retry_after_s
            if retry_after_s is None and failure.entry.http_status in (429, 503):
                retry_after_s = DEFAULT_RETRY_AFTER_S
            answer = failure.openai_body()
            return Reply(failure.entry.http_status, answer, request_id, retry_after_s)
        return Reply(exchange.status, json.loads(b"".join(exchange.parts)), request_id)


def batch_executor(
    core: RequestCore,
    folder: Path,
    fields: FieldPolicy | None = None,
    board: Board | None = None,
) -> Executor:
    """The executor of a data folder over this core; start its `run` on the core's event loop.

    At the gate, the batches of an API key are a tenant apart from the key's other requests.
    """
    return Executor(
        folder,
        lambda principal: InProcessTarget(
            core, principal=f"{BATCH_PREFIX}{principal}", fields=fields
        ),
        [name for model in core.models() for name in (model.name, *model.other_names)],
        board,
    )


class _Exchange:
    """Both directions of one ASGI request: the body, and the response."""

    def __init__(self, body: bytes):
        self._body: bytes | None = body
        self.status = 0
        self.parts: list[bytes] = []

    async def receive(self) -> MutableMapping[str, Any]:
        """The body; then blocks, because this client does not disconnect."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
