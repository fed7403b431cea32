"""`penstock.ray_data`: a Ray Data set, each row answered by a Penstock server.

    answer = build_processor(
        "http://10.0.0.1:8000",
        preprocess=lambda row: {"messages": [{"role": "user", "content": row["question"]}]},
    )
    answer(ray.data.read_parquet("questions")).write_parquet("answers")

The rows are sent by Ray actors, many at a time and in order of the data set, and wait behind all
other requests of the server. Needs `ray[data]`. Ray's own `HttpRequestProcessorConfig` sends
the rows of a batch one after the other, and one row that fails for good fails the data set.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.deployments.batch.retries import Retries
from penstock.deployments.batch.runner import LOWEST_PRIORITY, seed_of
from penstock.deployments.batch.server_target import ServerTarget
from penstock.deployments.batch.target import WRONG_KEY, Reply, TargetError
from penstock.deployments.batch.window import Window
from penstock.deployments.client.tls import ClientTls

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

Row = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """How one actor sends its rows; as for `build_processor`."""

    url: str
    preprocess: Callable[[Row], Mapping[str, Any]]
    postprocess: Callable[[Row], Row] | None
    endpoint: str
    api_key: str | None
    ca_file: str | None
    max_in_flight: int
    priority: int | None
    seed: int
    id_column: str | None
    give_up_s: float | None


def build_processor(
    url: str,
    preprocess: Callable[[Row], Mapping[str, Any]],
    postprocess: Callable[[Row], Row] | None = None,
    *,
    endpoint: str = CHAT,
    api_key: str | None = None,
    ca_file: str | None = None,
    num_actors: int = 1,
    batch_size: int = 32,
    max_in_flight: int = 64,
    priority: int | None = LOWEST_PRIORITY,
    seed: int = 0,
    id_column: str | None = None,
    give_up_s: float | None = None,
) -> Callable[[Dataset], Dataset]:
    """A function from a data set to the same with answers; lazy, as all of Ray Data is.

    `preprocess` makes the body of a request from a row. The result has the row's columns and
    `generated_text`, `finish_reason`, `prompt_tokens`, `completion_tokens` and `error`: where the
    server refused a row, why, and no text. With `postprocess` it has what that makes of the row,
    which has `http_response`, the body of the answer or None, and `error`.

    `ca_file`: of the CAs that are trusted with https, in PEM, on all nodes; None: the system's.

    `num_actors` send at a time, each at most `max_in_flight` requests, and fewer where the server
    refuses some. A row that is refused for lack of room, or while the server is away, is sent
    again; after `give_up_s` seconds that is its error (None: never). A row without a seed gets one
    of `seed` and its `id_column`, or its body: whatever is done again gives the same answers.
    `priority`: instead of each body's own; None keeps that. Raises ValueError.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url must be http://host:port or https://host:port; got {url!r}")
    if endpoint not in ENDPOINTS:
        raise ValueError(f"endpoint must be {CHAT} or {COMPLETIONS}; got {endpoint!r}")
    for name, value in (
        ("num_actors", num_actors),
        ("batch_size", batch_size),
        ("max_in_flight", max_in_flight),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if priority is not None and not 0 <= priority <= LOWEST_PRIORITY:
        raise ValueError(f"priority must be 0 to {LOWEST_PRIORITY}, or None; got {priority}")
    settings = _Settings(
        url=url,
        preprocess=preprocess,
        postprocess=postprocess,
        endpoint=endpoint,
        api_key=api_key,
        ca_file=ca_file,
        max_in_flight=max_in_flight,
        priority=priority,
        seed=seed,
        id_column=id_column,
        give_up_s=give_up_s,
    )

    def process(rows: Dataset) -> Dataset:
        return rows.map_batches(
            _Sender,
            fn_constructor_args=(settings,),
            batch_size=batch_size,
            batch_format="pyarrow",
            concurrency=num_actors,
        )

    return process


class _Sender:
    """Sends batches of rows; Ray Data makes one in each actor, and calls it on an event loop."""

    def __init__(self, settings: _Settings):
        self._settings = settings
        self._retries = Retries(Window(settings.max_in_flight, time.monotonic))
        self._target: ServerTarget | None = None

    async def __call__(self, batch: pyarrow.Table) -> dict[str, list[Any]]:
        """The batch with answers. Ray Data calls this for several batches at a time."""
        if self._target is None:
            most, key = self._settings.max_in_flight, self._settings.api_key
            ca_file = self._settings.ca_file
            self._target = ServerTarget(
                self._settings.url,
                api_key=key,
                max_connections=most,
                verify=True if ca_file is None else ClientTls(ca_file).context(),
            )
            try:
                await self._target.models()
            except TargetError as error:
                raise TargetError(f"{error} (in build_processor: url, api_key, ca_file)") from error
        rows = await asyncio.gather(*(self._answered(row) for row in batch.to_pylist()))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    async def _answered(self, row: Row) -> Row:
        """`row` with its answer, or its error."""
        body = self._body(row)
        try:
            async with asyncio.timeout(self._settings.give_up_s):
                reply = await self._retries.reply_of(lambda: self._send(body))
            error = None if reply.is_success else _error_of(reply)
            answer = reply.body if reply.is_success else None
        except TimeoutError:
            error, answer = f"gave up after {self._settings.give_up_s:g} s", None
        if self._settings.postprocess is not None:
            return self._settings.postprocess({**row, "http_response": answer, "error": error})
        return {**row, **_columns(answer), "error": error}

    async def _send(self, body: dict[str, Any]) -> Reply:
        assert self._target is not None
        reply = await self._target.send(self._settings.endpoint, body)
        if reply.status in WRONG_KEY:
            raise TargetError(f"{self._settings.url} refused the API key; pass it as api_key")
        return reply

    def _body(self, row: Row) -> dict[str, Any]:
        settings = self._settings
        body = dict(settings.preprocess(row))
        if body.get("seed") is None:
            key = settings.id_column
            identity = json.dumps(body, sort_keys=True) if key is None else str(row[key])
            body["seed"] = seed_of(settings.seed, identity)
        if settings.priority is not None:
            body["priority"] = settings.priority
        return body


def _error_of(reply: Reply) -> str:
    error = (reply.body or {}).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"{reply.error_code or reply.status}: {message or 'the answer is no JSON object'}"


def _columns(answer: dict[str, Any] | None) -> Row:
    """The columns of an answer, with None where there is none."""
    if answer is None:
        names = ("generated_text", "finish_reason", "prompt_tokens", "completion_tokens")
        return dict.fromkeys(names)
    choice, usage = answer["choices"][0], answer["usage"]
    return {
        "generated_text": choice["message"]["content"] if "message" in choice else choice["text"],
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
