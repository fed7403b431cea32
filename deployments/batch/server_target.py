"""An OpenAI-compatible server as the target of a batch, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from typing import Any, Self

import httpx

from penstock.deployments.batch.target import WRONG_KEY, Reply, TargetError, Unreachable

CONNECT_TIMEOUT_S = 10.0
REPORTS = "/v1/penstock/jobs"
START_S = 10.0  # for a server that starts to answer its first request
# A request may wait for hours, so a read has no limit; these detect a lost machine.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]


class ServerTarget:
    """A Target. An async context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        max_connections: int,
        verify: ssl.SSLContext | bool = True,
    ):
        """`url`: http(s)://host:port, with or without /v1. `verify`: for https; True: the system's
        CAs."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=max_connections)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(
                verify=verify, limits=limits, socket_options=_KEEP_ALIVE, trust_env=False
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """The served models as /v1/models has them; waits a little for a server that starts.

        Raises TargetError.
        """
        end_s = time.monotonic() + START_S
        while True:
            try:
                response = await self._http.get("/v1/models")
                break
            except httpx.HTTPError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise TargetError(
                        f"the certificate of {self.url} is not trusted; name its CA "
                        "(--ca-file, ca_file)"
                    ) from error
                if time.monotonic() > end_s:
                    raise TargetError(
                        f"cannot reach {self.url}: {type(error).__name__}; is the server running? "
                        "`penstock serve` starts one, and --model runs without one"
                    ) from error
            await asyncio.sleep(0.5)
        if response.status_code in WRONG_KEY:
            raise TargetError(
                f"{self.url} refused the API key; pass it by --api-key-file FILE or in "
                "PENSTOCK_API_KEY"
            )
        try:
            models = response.json()["data"]
            return [{"id": str(model["id"]), **model} for model in models]
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError(
                f"{self.url} answered GET /v1/models with {response.status_code} and no list of "
                "models; is it an OpenAI-compatible server?"
            ) from error

    async def report(self, body: dict[str, Any]) -> int | None:
        """Tell the server how far a batch is; the status of its answer, None without one."""
        try:
            response = await self._http.post(REPORTS, json=body, timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return response.status_code

    async def send(self, url: str, body: dict[str, Any]) -> Reply:
        """POST `body`. Raises Unreachable."""
        try:
            response = await self._http.post(url, content=json.dumps(body).encode())
        except httpx.HTTPError as error:
            raise Unreachable(type(error).__name__) from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        return Reply(
            response.status_code,
            answer if isinstance(answer, dict) else None,
            response.headers.get("x-request-id", ""),
            _seconds(response.headers.get("retry-after")),
        )


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header; one that names a date counts as none."""
    try:
        return None if retry_after is None else float(retry_after)
    except ValueError:
        return None
