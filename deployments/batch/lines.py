"""The input of a batch: one request a line, as OpenAI's batch files have them.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}

`check_input` reads a file once and keeps no bodies: it finds every line that cannot be run.
`read_lines` yields the requests, one at a time. The fields of a body are checked by the server or
by the engine's request core when the line runs, as for any other client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pydantic_core

from penstock.deployments.options import ANY_NAME

RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", RESPONSES, EMBEDDINGS)
FIELDS = ("custom_id", "method", "url", "body")
MAX_LINE_BYTES = (4 << 20) + 4096  # a body that the HTTP API takes, and the fields around it
MAX_CUSTOM_ID_CHARS = 512
MAX_PROBLEMS_KEPT = 50
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. `number` counts the lines of the file from 1, blank lines included."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line, or (with `line` None) the file, cannot be run. `param` names the field."""

    line: int | None
    param: str | None
    code: str
    message: str

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class InputError(ValueError):
    """The input has `num_problems`; the first MAX_PROBLEMS_KEPT are in `problems`."""

    def __init__(self, problems: list[LineProblem], num_problems: int):
        self.problems = problems
        self.num_problems = num_problems
        super().__init__("\n".join(map(str, problems)))


@dataclass(frozen=True, slots=True)
class InputSummary:
    """What is known of a checked input. `sha256` is of all its bytes, in hex."""

    sha256: str
    num_lines: int  # requests; blank lines do not count
    num_bytes: int


class _Invalid(Exception):
    """One line is invalid."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        self.message, self.param, self.code = message, param, code
        super().__init__(message)


def check_input(
    file: BinaryIO,
    *,
    endpoint: str | None = None,
    models: Collection[str] | None = None,
    max_lines: int | None = None,
    max_bytes: int | None = None,
) -> InputSummary:
    """Read all of `file`, from its start, and check every line. Raises InputError with them all.

    `endpoint`: the one path that lines may name; None: any of ENDPOINTS. `models`: the names that
    bodies may contain; None: any.
    """
    digest = hashlib.sha256()
    seen: dict[bytes, int] = {}  # the line of each custom_id, by a digest of it
    problems: list[LineProblem] = []
    num_problems = num_lines = 0

    def add(line: int | None, param: str | None, code: str, message: str) -> None:
        nonlocal num_problems
        num_problems += 1
        if len(problems) < MAX_PROBLEMS_KEPT:
            problems.append(LineProblem(line, param, code, message))

    file.seek(0)
    for number, raw in _raw_lines(file, digest.update):
        if raw.isspace() or not raw:
            continue
        num_lines += 1
        try:
            line = _parse(number, raw, endpoint)
            key = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
            if (first := seen.setdefault(key, number)) != number:
                raise _Invalid(
                    f"custom_id {_shown(line.custom_id)} is that of line {first} too; each line "
                    "needs its own",
                    "custom_id",
                    "duplicate_custom_id",
                )
            _check_model(line.body.get("model"), models)
        except _Invalid as error:
            add(number, error.param, error.code, error.message)
    num_bytes = file.tell()
    if num_lines == 0:
        add(None, None, "empty_file", "the file has no requests; write one JSON object a line")
    if max_lines is not None and num_lines > max_lines:
        add(
            None,
            None,
            "too_many_lines",
            f"the file has {num_lines} requests; a batch takes at most {max_lines}: split the file",
        )
    if max_bytes is not None and num_bytes > max_bytes:
        add(
            None,
            None,
            "file_too_large",
            f"the file has {num_bytes} bytes; a batch takes at most {max_bytes}: split the file",
        )
    if num_problems:
        raise InputError(problems, num_problems)
    return InputSummary(digest.hexdigest(), num_lines, num_bytes)


def read_lines(file: BinaryIO, done: Collection[int] = ()) -> Iterator[BatchLine]:
    """The requests of a checked file, from its start, without the lines numbered in `done`."""
    file.seek(0)
    for number, raw in _raw_lines(file):
        if number not in done and raw and not raw.isspace():
            yield _parse(number, raw, None)


def _raw_lines(
    file: BinaryIO, on_bytes: Callable[[bytes], object] | None = None
) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line, cut at MAX_LINE_BYTES + 1; `on_bytes` receives all bytes."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        kept = raw
        while True:
            if on_bytes is not None:
                on_bytes(raw)
            if raw.endswith(b"\n") or len(raw) <= MAX_LINE_BYTES:
                break
            raw = file.readline(MAX_LINE_BYTES + 1)  # the rest of a line that is too long
        yield number, kept.removeprefix(BOM) if number == 1 else kept


def _parse(number: int, raw: bytes, endpoint: str | None) -> BatchLine:
    """The request in one line. Raises _Invalid."""
    if len(raw) > MAX_LINE_BYTES:
        raise _Invalid(f"the line exceeds {MAX_LINE_BYTES} bytes", code="line_too_large")
    try:
        values = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _Invalid(f"not valid JSON: {str(error)[:200]}", code="invalid_json_line") from None
    if not isinstance(values, dict):
        raise _Invalid("each line must be a JSON object", code="invalid_json_line")
    for name in FIELDS:
        if name not in values:
            raise _Invalid(f"{name} is missing", name, "missing_required_parameter")
    unknown = next((name for name in values if name not in FIELDS), None)
    if unknown is not None:
        shown = ascii(unknown[:100])[1:-1]
        raise _Invalid(
            f"unknown field '{shown}'; a line has {', '.join(FIELDS)}", shown, "unknown_parameter"
        )
    custom_id, method, url, body = (values[name] for name in FIELDS)
    if not (isinstance(custom_id, str) and 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS):
        raise _Invalid(
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    if method != "POST":
        raise _Invalid('method must be "POST"', "method", "invalid_method")
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if url not in allowed:
        which = "one of " if len(allowed) > 1 else ""
        raise _Invalid(
            f"url must be {which}{', '.join(allowed)}; got {_shown(url)}", "url", "invalid_url"
        )
    if not isinstance(body, dict):
        raise _Invalid("body must be a JSON object", "body")
    for name in ("stream", "background"):
        if body.get(name):
            raise _Invalid(
                f"body.{name}: a batch waits for each whole answer; leave it out", f"body.{name}"
            )
    return BatchLine(number, custom_id, url, body)


def _check_model(model: Any, models: Collection[str] | None) -> None:
    """Raise _Invalid for a model that is not served. The server refuses values of other types."""
    if models is None or ANY_NAME in models:
        return
    if isinstance(model, str) and model and model not in models:
        raise _Invalid(
            f"body.model: {_shown(model)} is not served here; served: {', '.join(sorted(models))}",
            "body.model",
            "model_not_found",
        )


def _shown(value: Any) -> str:
    return ascii(value)[:100]
