"""Clients as users have them, and what each hears of a call: OpenAI's, Penstock's, plain HTTP.

OpenAI's client has Penstock's transport that resumes streams, Penstock's client resumes by itself,
and the plain one does what the guide says: it sends the id of the last event that arrived whole.
A call that was refused or cut before its first token is sent again, as every client may.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from benchmarks.faults.workload import SCHEMA, TOOL, Answer, make_fields
from penstock.deployments.client import AsyncClient, ClientError, Piece
from penstock.deployments.client.http_resume import AsyncResumingTransport

NAMES = ("openai", "gRPC", "HTTP")
CALL_S = 240.0  # then a call counts as lost: it hangs
RESUME_S = 120.0
AGAIN_S = 0.5
TRANSIENT = ("unavailable", "no_worker", "overloaded", "state_unavailable", "cut")
STATUSES = (429, 500, 502, 503, 504)


class CallError(Exception):
    """A call ended without its whole answer. `code`: the server's, or what the client saw."""

    def __init__(self, code: str, message: str = ""):
        self.code = code
        super().__init__(f"{code}: {message[:300]}")


@dataclass
class Heard:
    """The answer, when its tokens came, and how often the call was sent or continued."""

    answer: Answer = field(default_factory=Answer)
    arrivals: list[float] = field(default_factory=list)
    sent_s: float = 0.0
    request_id: str = ""
    resent: Counter[str] = field(default_factory=Counter)  # before the first token, by cause

    def add_text(self, choice: int, text: str, token_ids: list[int]) -> None:
        self.arrivals.append(time.monotonic())
        self.answer.text[choice] = self.answer.text.get(choice, "") + text
        self.answer.ids.setdefault(choice, []).extend(token_ids)

    def add_tool(self, choice: int, told: str) -> None:
        self.answer.tool_calls[choice] = self.answer.tool_calls.get(choice, "") + told

    def end(self, choice: int, *reasons: Any) -> None:
        self.answer.ends[choice] = reasons

    def take_piece(self, piece: Piece) -> None:
        """A message of Penstock's client. Not cached_tokens: they depend on the worker."""
        self.request_id = self.request_id or piece.request_id
        self.add_text(piece.choice, piece.text, list(piece.token_ids))
        scored = self.answer.scored.setdefault(piece.choice, [])
        scored.extend((each.token_id, each.rank) for each in piece.logprobs)
        for call in piece.tool_calls:
            self.add_tool(piece.choice, call.name + call.arguments)
        if piece.finish_reason is not None:
            self.end(piece.choice, str(piece.finish_reason))
        if piece.usage is not None:
            used = piece.usage
            self.end(-1, used.prompt_tokens, used.completion_tokens, used.evicted_tokens)

    def take_chunk(self, chunk: dict[str, Any]) -> None:
        """A chunk of a completion or of a chat. Raises CallError for an error event."""
        if chunk.get("error"):
            raise CallError(str(chunk["error"].get("code")), str(chunk["error"].get("message")))
        self.request_id = self.request_id or chunk["id"].partition("-")[2]
        if used := chunk.get("usage"):
            self.end(-1, used["prompt_tokens"], used["completion_tokens"])
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            self.add_text(index, text, choice.get("token_ids") or [])
            if scores := choice.get("logprobs"):
                tokens = scores.get("tokens") or ()
                self.answer.scored.setdefault(index, []).extend((each,) for each in tokens)
            for call in delta.get("tool_calls") or ():
                made = call.get("function") or {}
                self.add_tool(index, (made.get("name") or "") + (made.get("arguments") or ""))
            if choice.get("finish_reason"):
                self.end(index, choice["finish_reason"], choice.get("stop_reason"))


class Clients:
    """The three clients of one server. An async context manager."""

    def __init__(self, http_url: str, grpc_target: str, model: str):
        self._url, self._model = http_url, model
        limits = httpx.Limits(max_connections=256)
        self._plain = httpx.AsyncClient(base_url=http_url, timeout=CALL_S, limits=limits)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{http_url}/v1",
            api_key="none",
            max_retries=8,
            http_client=openai.DefaultAsyncHttpxClient(
                transport=AsyncResumingTransport(resume_s=RESUME_S)
            ),
        )
        self._grpc = AsyncClient(grpc_target, resume_s=RESUME_S)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._plain.aclose()
        await self._openai.close()
        await self._grpc.close()

    async def call(self, name: str, number: int, seed: int | None = None) -> Heard:
        """Run call `number` by client `name` to its end; `seed` is for one that has none.

        Raises CallError for a call that is lost: ended, hung, or not begun within CALL_S.
        """
        feature, prompt, fields = make_fields(number)
        if seed is not None:
            fields["seed"] = seed
        resent: Counter[str] = Counter()
        until_s = time.monotonic() + CALL_S
        while True:
            heard = Heard(sent_s=time.monotonic(), resent=resent)
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + CALL_S):
                    await self._run(name, feature, prompt, fields, heard)
                return heard
            except TimeoutError:
                raise CallError("hung", f"after {len(heard.arrivals)} pieces") from None
            except CallError as error:
                has_begun = bool(heard.arrivals)
                if has_begun or error.code not in TRANSIENT or time.monotonic() > until_s:
                    raise
                resent[error.code] += 1
            await asyncio.sleep(AGAIN_S)

    async def _run(
        self, name: str, feature: str, prompt: str, fields: dict[str, Any], heard: Heard
    ) -> None:
        if name == "gRPC":
            await self._run_grpc(feature, prompt, fields, heard)
            return
        body = {"model": self._model, "return_token_ids": True, **fields}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "chat/completions" if feature == "tools" else "completions"
        if feature == "tools":
            function = {"name": TOOL.name, "description": "Looks.", "parameters": TOOL.parameters}
            body["messages"] = [{"role": "user", "content": prompt}]
            body["tools"] = [{"type": "function", "function": function}]
        else:
            body["prompt"] = prompt
        if feature == "json_schema":
            schema = {"name": "person", "schema": json.loads(SCHEMA), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        run = self._run_openai if name == "openai" else self._run_plain
        await run(path, body, heard)

    async def _run_grpc(
        self, feature: str, prompt: str, fields: dict[str, Any], heard: Heard
    ) -> None:
        sampling: Any = dict(fields)
        if feature == "json_schema":
            sampling["json_schema"] = SCHEMA
        if feature == "tools":
            tool: Any = {"name": TOOL.name, "description": "Looks."}
            tool["parameters"] = TOOL.parameters
            messages = [{"role": "user", "content": prompt}]
            stream = self._grpc.chat(messages, tools=[tool], **sampling)
        else:
            stream = self._grpc.generate(prompt, **sampling)
        try:
            async for piece in stream:
                heard.take_piece(piece)
        except ClientError as error:
            raise CallError(error.code, error.message) from None

    async def _run_openai(self, path: str, body: dict[str, Any], heard: Heard) -> None:
        """By the client's own method, with the fields that it does not know in extra_body."""
        endpoint: Any = self._openai.completions
        if path.startswith("chat"):
            endpoint = self._openai.chat.completions
        own = ("model", "prompt", "messages", "stream")
        given = {name: body[name] for name in own if name in body}
        extra = {name: value for name, value in body.items() if name not in own}
        try:
            async for chunk in await endpoint.create(**given, extra_body=extra):
                heard.take_chunk(chunk.model_dump())
        except openai.APIStatusError as error:
            code = "unavailable" if error.status_code in STATUSES else str(error.code)
            raise CallError(code, error.message) from None
        except openai.APIConnectionError as error:
            raise CallError("cut", repr(error.__cause__)) from None
        except openai.APIError as error:
            raise CallError(str(error.code), error.message) from None
        except Exception as error:  # httpx2's own, in mid-stream
            raise CallError("cut", repr(error)) from None

    async def _run_plain(self, path: str, body: dict[str, Any], heard: Heard) -> None:
        """Until [DONE]; a cut stream is continued from the last event that came whole."""
        request = self._plain.build_request("POST", f"/v1/{path}", json=body)
        event_id, call_id, until_s = "", "", time.monotonic() + RESUME_S
        while True:
            try:
                response = await self._plain.send(request, stream=True)
                try:
                    if response.status_code != 200:
                        code = "unavailable" if response.status_code in STATUSES else "refused"
                        raise CallError(code, (await response.aread()).decode())
                    if response.headers.get("x-penstock-resumable") == "1":
                        call_id = call_id or response.headers["x-request-id"]
                    async for event_id_now, data in _events(response):
                        event_id = event_id_now or event_id
                        until_s = time.monotonic() + RESUME_S
                        if data == "[DONE]":
                            return
                        heard.take_chunk(json.loads(data))
                finally:
                    await response.aclose()
                problem = CallError("cut", "the stream ended without [DONE]")
            except httpx.HTTPError as error:
                problem = CallError("cut", repr(error))
            except CallError as error:
                if error.code not in (*TRANSIENT, "worker_lost") or not call_id:
                    raise
                problem = error
            if not call_id or time.monotonic() > until_s:
                raise problem
            await asyncio.sleep(AGAIN_S)
            headers = {"last-event-id": event_id} if event_id else {}
            path_of_stream = f"/v1/penstock/streams/{call_id}"
            request = self._plain.build_request("GET", path_of_stream, headers=headers)


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Each event that came whole: its id, or "", and its data."""
    event_id, data = "", ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield event_id, data
            event_id, data = "", ""
