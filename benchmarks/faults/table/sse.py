"""A client of server-sent events that is as plain as can be: it sees each event and its id."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.faults.table.house import BODY, Streamed


class Events:
    """One stream of completions. `last_id`: of the last event that came whole."""

    def __init__(self, http: httpx.AsyncClient):
        self._http = http
        self.got = Streamed(arrivals=[time.monotonic()])
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.last_id = ""
        self.is_done = False  # [DONE] came

    async def post(
        self,
        url: str,
        prompt: Any,
        told: Callable[[int], Awaitable[None]] | None = None,
        **body: Any,
    ) -> None:
        """Run a stream to its end or its break. Raises httpx.HTTPError where it is cut."""
        content = {**BODY, "prompt": prompt, "max_tokens": 20, "stream": True, **body}
        content |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        request = self._http.build_request("POST", f"{url}/v1/completions", json=content)
        await self._read(request, told)

    async def resume(self, url: str) -> None:
        """Go on after the last event, at any ingress."""
        call_id = self.headers["x-request-id"]
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        path = f"{url}/v1/penstock/streams/{call_id}"
        await self._read(self._http.build_request("GET", path, headers=headers), None)

    async def _read(
        self, request: httpx.Request, told: Callable[[int], Awaitable[None]] | None
    ) -> None:
        response = await self._http.send(request, stream=True)
        self.status, self.headers = response.status_code, self.headers or response.headers
        try:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                self.got.error = error["code"]
                self.headers = response.headers
                return
            event_id, data = "", ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: "):
                    data = line[6:]
                elif not line and data:
                    self.last_id = event_id or self.last_id
                    self._take(data)
                    event_id, data = "", ""
                    if told is not None:
                        await told(len(self.got.token_ids))
        finally:
            await response.aclose()

    def _take(self, data: str) -> None:
        got = self.got
        got.arrivals.append(time.monotonic())
        if data == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            got.error = chunk["error"]["code"]
            return
        if used := chunk.get("usage"):
            got.num_tokens = used["completion_tokens"]
        for choice in chunk["choices"]:
            got.text += choice.get("text") or ""
            got.token_ids += choice.get("token_ids") or []
            got.finish = choice.get("finish_reason") or got.finish
