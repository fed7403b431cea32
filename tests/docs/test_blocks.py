"""Blocks of the pages are what they say: JSON, YAML, TOML and Python are read, and every curl asks
for a route of the HTTP app with a method that it has."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from penstock.deployments.security.roles import ROUTES
from tests.docs.pages import Block, all_blocks, shell_lines

URL = re.compile(r"https?://[\w.:${}-]+(/[^\s\"'?]*)?")
OTHER_HOSTS = ("api.example.com",)


def documents(text: str) -> None:
    """Reads one JSON value, or one in each line."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


READERS: dict[str, Callable[[str], Any]] = {
    "json": documents,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "python": ast.parse,
}


@pytest.mark.parametrize("language", READERS)
def test_every_block_can_be_read(language):
    blocks = all_blocks(language)
    assert blocks
    for block in blocks:
        try:
            READERS[language](block.text)
        except (ValueError, SyntaxError, yaml.YAMLError) as error:
            pytest.fail(f"{block}: {error}")


def test_a_fence_has_a_language_that_is_looked_at():
    known = {"", "bash", "text", "mermaid", *READERS}
    assert {block.language for block in all_blocks(*known, "sh", "console", "yml", "js")} <= known


def call_of(line: str) -> tuple[str, str] | None:
    """Method and path of the curl command in a line; None where it has none."""
    if not re.search(r"(?:^|\s)curl ", line):
        return None
    address = URL.search(line)
    assert address is not None, line
    stated = re.search(r"(?:-X|--request) (\w+)", line)
    has_body = re.search(r" (?:-d|--data\S*|-F|--form) ", line)
    method = stated[1] if stated else "POST" if has_body else "GET"
    return method, re.sub(r"\$\{?\w+\}?", "x", address[1] or "/")


def is_route(method: str, path: str) -> bool:
    return any(
        known == method and re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", route), path)
        for known, route in ROUTES
    )


def curls() -> list[tuple[Block, tuple[str, str]]]:
    return [
        (block, call)
        for block in all_blocks("", "bash", "text")
        # A body in quotation marks may go on over lines.
        for line in shell_lines(
            re.sub(r"'[^']*'", lambda found: found[0].replace("\n", " "), block.text)
        )
        if (call := call_of(line)) is not None
    ]


def test_every_curl_asks_for_a_route():
    found = curls()
    assert len(found) >= 10
    assert not [(str(block), call) for block, call in found if not is_route(*call)]


@pytest.mark.parametrize(
    "line",
    [
        "curl http://127.0.0.1:8000/v1/chat/completion -d '{}'",
        "curl http://127.0.0.1:8000/v1/chat/completions",
        "curl -X PUT http://127.0.0.1:8000/v1/models",
    ],
)
def test_a_wrong_curl_is_found(line):
    call = call_of(line)
    assert call is not None
    assert not is_route(*call)


def test_the_bodies_of_curls_are_json():
    num_bodies = 0
    for block in all_blocks("", "bash"):
        for body in re.findall(r"(?:-d|--data) '([^']*)'", block.text):
            json.loads(body)
            num_bodies += 1
    assert num_bodies >= 4
