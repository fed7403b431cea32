"""POST /v1/files: a multipart body, written to disk as it arrives and never held in memory."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.base_protocol import BaseProtocol

from penstock.deployments.batch.file_store import (
    DEFAULT_TTL_S,
    MAX_FILE_BYTES,
    MAX_FILENAME_CHARS,
    OwnerFiles,
    StoredFile,
    StoreFull,
    Upload,
)
from penstock.deployments.ingress.http.asgi import ClientGone, Receive, Scope, header
from penstock.workers.request import RequestError

CHUNK_BYTES = 1 << 18
MAX_TEXT_BYTES = 1024  # of a field that is no file
MAX_OVERHEAD_BYTES = 64 << 10  # boundaries, headers and the other fields
MIN_TTL_S, MAX_TTL_S = 3600, DEFAULT_TTL_S
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)


async def read_upload(scope: Scope, receive: Receive, files: OwnerFiles) -> StoredFile:
    """Store the file in the body. On an error, RequestError or ClientGone, no file is left."""
    _check_head(scope)
    try:
        await asyncio.to_thread(files.check_room, _declared(scope))
    except StoreFull as error:
        raise RequestError(str(error), param="file", code="request_too_large") from None
    body = _Body(receive)
    reading = asyncio.create_task(body.pump())
    try:
        with files.upload() as upload:
            return await _read_parts(scope, body, upload)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read_parts(scope: Scope, body: _Body, upload: Upload) -> StoredFile:
    texts: dict[str, str] = {}
    filename: str | None = None
    try:
        content_type = header(scope, b"content-type") or ""
        reader = aiohttp.MultipartReader({"Content-Type": content_type}, body.stream)
        while (part := await reader.next()) is not None:
            if not isinstance(part, aiohttp.BodyPartReader):
                raise RequestError("a part of the body must not be multipart", param="file")
            name = part.name or ""
            if name not in _FIELDS:
                shown = ascii(name[:100])[1:-1]
                raise RequestError(
                    f"unknown field '{shown}'; an upload has file, purpose and expires_after",
                    param=shown,
                    code="unknown_parameter",
                )
            if name in texts or (name == "file" and filename is not None):
                raise RequestError(f"{name} is given twice; send it once", param=name)
            if name == "file":
                filename = (part.filename or "")[:MAX_FILENAME_CHARS] or "upload"
                await _copy(part, upload)
            else:
                texts[name] = await _text(part, name)
    except (RequestError, ClientGone, OSError):
        raise
    except Exception as error:  # the parser has no common type for what is malformed
        raise RequestError(
            "the body is not valid multipart/form-data, or it ended too early", code="invalid_json"
        ) from error
    if filename is None:
        raise RequestError("file: this field is required", param="file", code="missing_parameter")
    if texts.get("purpose") != "batch":
        code = "invalid_value" if "purpose" in texts else "missing_parameter"
        raise RequestError(
            "purpose must be 'batch': this server keeps files for batches only",
            param="purpose",
            code=code,
        )
    ttl_s = _ttl_s(texts)
    return await asyncio.to_thread(upload.keep, filename, "batch", ttl_s)


async def _copy(part: aiohttp.BodyPartReader, upload: Upload) -> None:
    while chunk := await part.read_chunk(CHUNK_BYTES):
        if upload.num_bytes + len(chunk) > MAX_FILE_BYTES:
            raise _too_large()
        await asyncio.to_thread(upload.write, bytes(chunk))


async def _text(part: aiohttp.BodyPartReader, name: str) -> str:
    content = b""
    while chunk := await part.read_chunk():
        content += chunk
        if len(content) > MAX_TEXT_BYTES:
            raise RequestError(f"{name} has at most {MAX_TEXT_BYTES} bytes", param=name)
    return content.decode("utf-8", "replace")


def _ttl_s(texts: dict[str, str]) -> int:
    """How long the file is kept, in seconds. Raises RequestError."""
    if _ANCHOR not in texts and _SECONDS not in texts:
        return DEFAULT_TTL_S
    if texts.get(_ANCHOR) != "created_at":
        raise RequestError(f"{_ANCHOR} must be 'created_at'", param=_ANCHOR)
    seconds = texts.get(_SECONDS, "")
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if not (is_number and MIN_TTL_S <= int(seconds) <= MAX_TTL_S):
        raise RequestError(f"{_SECONDS} must lie in [{MIN_TTL_S}, {MAX_TTL_S}]", param=_SECONDS)
    return int(seconds)


def _check_head(scope: Scope) -> None:
    """Raise RequestError for another type, too large a body, or a page of another origin."""
    content_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    origin = header(scope, b"origin")
    # Browsers send this type across origins without a preflight request.
    is_foreign = origin is not None and urlsplit(origin).netloc != header(scope, b"host")
    if content_type != "multipart/form-data" or is_foreign:
        raise RequestError(
            "send the file as multipart/form-data, and not from a web page of another origin",
            code="unsupported_media_type",
        )
    if _declared(scope) > MAX_FILE_BYTES + MAX_OVERHEAD_BYTES:
        raise _too_large()


def _declared(scope: Scope) -> int:
    declared = header(scope, b"content-length") or ""
    return int(declared[:18]) if declared.isascii() and declared.isdigit() else 0


def _too_large() -> RequestError:
    return RequestError(
        f"a file has at most {MAX_FILE_BYTES} bytes; split it", code="request_too_large"
    )


class _Body(BaseProtocol):
    """The body of an ASGI request as the stream that aiohttp's parser reads; bounded."""

    def __init__(self, receive: Receive):
        loop = asyncio.get_running_loop()
        super().__init__(loop)
        self._receive = receive
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._num_bytes = 0
        self.stream = aiohttp.StreamReader(self, CHUNK_BYTES, loop=loop)

    @property
    def connected(self) -> bool:
        return True  # there is no transport: `receive` reports a disconnect

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self, *args: Any, **options: Any) -> None:
        self._may_read.set()

    async def pump(self) -> None:
        """Feed the stream until the body ends; an error is raised where the stream is read."""
        while True:
            await self._may_read.wait()
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.stream.set_exception(ClientGone())
                return
            data = message.get("body", b"")
            self._num_bytes += len(data)
            if self._num_bytes > MAX_FILE_BYTES + MAX_OVERHEAD_BYTES:
                self.stream.set_exception(_too_large())
                return
            self.stream.feed_data(data)
            if not message.get("more_body"):
                self.stream.feed_eof()
                return
