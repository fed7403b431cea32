"""Lines of the output and error files, in OpenAI's format, and the token counts of a reply."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from penstock.deployments.batch.lines import BatchLine
from penstock.deployments.batch.part_file import TokenCounts
from penstock.deployments.batch.target import Reply

EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"
_MESSAGES = {
    EXPIRED: "this request was not finished before the batch's time was over",
    CANCELLED: "the batch was cancelled before this request was finished",
}

_COMPLETIONS, _RESPONSES = ("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")


def of_reply(line: BatchLine, reply: Reply) -> bytes:
    """The result of a line that was answered, or refused for good."""
    if reply.body is None:
        return of_error(line, "invalid_answer", f"the server answered {reply.status} and no JSON")
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    return _line(line, response=response, error=None)


def of_unfinished(line: BatchLine, code: str) -> bytes:
    """The result of a line that did not run. `code`: EXPIRED or CANCELLED."""
    return of_error(line, code, _MESSAGES[code])


def of_error(line: BatchLine, code: str, message: str) -> bytes:
    return _line(line, response=None, error={"code": code, "message": message})


def code_of(result: bytes) -> str:
    """The error code in a line of an error file."""
    values = json.loads(result)
    error = values["error"] or (values["response"]["body"] or {}).get("error")
    return str(_of(error, "code") or f"HTTP {_of(values['response'], 'status_code')}")


def _line(line: BatchLine, **fields: Any) -> bytes:
    head = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}
    return json.dumps(head | fields, ensure_ascii=True, separators=(",", ":")).encode()


def tokens_of(reply: Reply) -> TokenCounts:
    """From `usage`, in the words of either of OpenAI's APIs; 0 for what it lacks."""
    usage = (reply.body or {}).get("usage")
    words = _RESPONSES if _of(usage, "input_tokens") is not None else _COMPLETIONS
    prompt, completion = _of(usage, f"{words[0]}_details"), _of(usage, f"{words[1]}_details")
    return TokenCounts(
        _count(usage, words[0]),
        _count(prompt, "cached_tokens"),
        _count(usage, words[1]),
        _count(completion, "reasoning_tokens"),
    )


def _of(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, Mapping) else None


def _count(values: Any, name: str) -> int:
    count = _of(values, name)
    return count if isinstance(count, int) and count >= 0 else 0
