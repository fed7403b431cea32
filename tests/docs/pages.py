"""What the tests of the documents read: pages, their code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference" / "cli.md"  # made from the parser itself
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page != GENERATED
]
_COMMAND = re.compile(r"(?i:(?<!user ))(?:^|(?<=[\s($]))penstock ([a-z].*)")  # not Redis' user
_REMARK = re.compile(r"\s#\s.*|\s{3,}\S.*|\s&$")  # behind a command: "   # why", or three blanks


@dataclass(frozen=True)
class Block:
    """A block of code; `language` is "" for an indented one and for a fence without a name."""

    page: Path
    line: int  # of its first line, from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced and the indented blocks of a page, in its order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        start = at
        if fence := re.match(r"```(\w*)$", lines[at]):
            at = start + 1
            while lines[at] != "```":
                at += 1
            yield Block(page, start + 2, fence[1], "\n".join(lines[start + 1 : at]) + "\n")
            at += 1
        elif _begins_indented(lines, at):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
                at += 1
            text = "\n".join(line[4:] for line in lines[start:at])
            yield Block(page, start + 1, "", f"{text.rstrip()}\n")
        else:
            at += 1


def _begins_indented(lines: list[str], at: int) -> bool:
    """Four blanks behind an empty line, which do not continue an item of a list."""
    if not lines[at].startswith("    ") or (at and lines[at - 1]):
        return False
    before = next((line for line in reversed(lines[:at]) if line), "")
    return not re.match(r"\s*([-*]|\d+\.) ", before)


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in one of these languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def shell_lines(text: str) -> list[str]:
    """The lines of a block, with those that a backslash continues as one."""
    return text.replace("\\\n", " ").splitlines()


def command_in(line: str) -> list[str] | None:
    """The arguments of the `penstock` command in a line; None where it has none.

    Of `a|b` the first counts, and "..." stands for nothing.
    """
    found = _COMMAND.search(line)
    if found is None:
        return None
    text = _REMARK.sub("", f"{found[1].rstrip()} ").strip().rstrip(")")
    words = [word for word in shlex.split(text, comments=True) if word != "..."]
    if ">" in words:  # into a file
        words = words[: words.index(">")]
    return [word.split("|")[0] if word[0].isalpha() else word for word in words]


def ray_job_commands() -> list[tuple[str, list[str]]]:
    """Each `ray job` command of the blocks of all pages: where it stands, its arguments."""
    return [
        (str(block), shlex.split(line, comments=True)[2:])
        for block in all_blocks("", "bash")
        for line in shell_lines(block.text)
        if line.startswith("ray job ")
    ]


def commands() -> list[tuple[str, list[str]]]:
    """Each `penstock` command of the blocks of all pages: where it stands, its arguments."""
    return [
        (str(block), words)
        for block in all_blocks("", "bash", "sh", "text")
        for line in shell_lines(block.text)
        if (words := command_in(line)) is not None
    ]


def inline_commands() -> list[tuple[str, list[str]]]:
    """Each `penstock` command between backticks in the text of all pages."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        for command in re.findall(r"`(penstock [a-z][^`]*)`", text):
            words = command_in(command.replace("[", "").replace("]", "").replace("\\|", "|"))
            assert words is not None
            found.append((f"{page.relative_to(ROOT)}: {command}", words))
    return found
