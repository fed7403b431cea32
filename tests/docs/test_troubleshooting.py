"""Messages that the pages explain are messages of the program: each stands in the source, so that
the page changes when a message does."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from penstock.deployments.ingress.core.errors import CATALOGUE
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "operations" / "troubleshooting.md"
GGUF_PAGE = ROOT / "docs" / "guide" / "gguf.md"
SECTIONS = ("At the start", "From the command line as a client", "From the API")
VARIABLE = "..."


@functools.cache
def texts() -> tuple[str, ...]:
    """Every text of the source, with VARIABLE for what is filled in."""
    found = []
    for folder in ("deployments", "workers", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [text for node in ast.walk(tree) if (text := _text_of(node))]
    return tuple(found)


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]", VARIABLE, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else VARIABLE for part in node.values)
        return "".join(map(str, parts))
    return ""


def is_said(message: str) -> bool:
    """Whether one text of the source has the fixed parts of a message, in their order."""
    parts = [re.escape(part) for part in message.split(VARIABLE)]
    pattern = re.compile(".*".join(parts), re.S)
    return any(pattern.search(text) for text in texts())


def rows(section: str, page: Path = PAGE) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    text = page.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines[1:]]


@pytest.mark.parametrize(
    ("section", "page"),
    [*((section, PAGE) for section in SECTIONS), ("What is refused", GGUF_PAGE)],
)
def test_each_message_is_one_of_the_program(section, page):
    found = [message for row in rows(section, page) for message in re.findall(r"`([^`]+)`", row[0])]
    assert len(found) >= 5
    assert all(len(message.replace(VARIABLE, "").strip()) >= 10 for message in found), found
    assert not [message for message in found if not is_said(message)]


def test_each_code_has_its_status():
    for row in rows("From the API"):
        status, code = re.fullmatch(r"(\d+) `(\w+)`", row[1]).groups()  # type: ignore[union-attr]
        assert CATALOGUE[code].http_status == int(status), row


def test_every_row_has_a_cause_and_a_remedy():
    for section in SECTIONS:
        width = 4 if section == "From the API" else 3
        assert all(len(row) == width and all(row) for row in rows(section)), section


def test_a_message_that_nobody_says_is_found():
    assert not is_said("the hub is on holiday")
    assert not is_said("could not start ... a worker")  # the order counts
    assert is_said("the KV pool of ... GiB holds no block of")
