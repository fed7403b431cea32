"""Inputs for tests, and what their results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_input(path: Path, num_lines: int, *, max_tokens: int = 24) -> Path:
    """Greedy requests, seeded ones and ones without a seed, of both endpoints; some fail."""
    with open(path, "w") as file:
        for i in range(num_lines):
            file.write(json.dumps(_request(i, max_tokens)) + "\n")
    return path


def _request(i: int, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": max_tokens + i % 7, "return_token_ids": True}
    if i % 3 == 0:
        body["temperature"] = 0
    elif i % 3 == 1:
        body["seed"] = i
    if is_invalid(i):
        body["temperature"] = -1
    prompt = f"{i} men stood at the door and"
    if i % 2:
        url, body["prompt"] = "/v1/completions", prompt
    else:
        url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
    return {"custom_id": f"request {i}", "method": "POST", "url": url, "body": body}


def is_invalid(i: int) -> bool:
    """Whether the server refuses request `i`."""
    return i % 50 == 7


def ids_of(path: Path) -> dict[str, list[int]]:
    """The token ids in an output, by custom_id; fails if one is there twice."""
    ids: dict[str, list[int]] = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        assert result["custom_id"] not in ids, "two results of one request"
        assert result["response"]["status_code"] == 200
        (choice,) = result["response"]["body"]["choices"]
        ids[result["custom_id"]] = choice["token_ids"]
    return ids


def errors_of(path: Path) -> dict[str, str]:
    """The error codes in an error file, by custom_id."""
    codes = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        assert result["custom_id"] not in codes, "two results of one request"
        error = result["error"] or result["response"]["body"]["error"]
        codes[result["custom_id"]] = error["code"]
    return codes


def check_complete(output: Path, errors: Path, num_lines: int) -> dict[str, list[int]]:
    """Fail unless each line has one result, in order; the token ids of the output."""
    ids = ids_of(output)
    expected = [f"request {i}" for i in range(num_lines) if not is_invalid(i)]
    assert list(ids) == expected
    invalid = {f"request {i}": "invalid_value" for i in range(num_lines) if is_invalid(i)}
    assert (errors_of(errors) if invalid else {}) == invalid
    assert errors.exists() == bool(invalid)
    beside = [*output.parent.glob(f"{output.name}.*"), *errors.parent.glob(f"{errors.name}.*")]
    assert beside == [output.with_name(f"{output.name}.state")]
    return ids
