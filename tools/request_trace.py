"""Counts what one streamed chat request passes: functions, files, changes of file, lines.

    python -m tools.request_trace

request_trace.txt lists the functions in the order in which POST /v1/chat/completions with
`stream: true` calls them (CPU worker, gate present, admission credit at hand): stage, file, name.
A function that is renamed or moved must be changed there too; tests/tools/test_request_trace.py
finds it. The fewer changes of file, the easier a request is to follow.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tools" / "request_trace.txt"


@dataclass(frozen=True, slots=True)
class Hop:
    """One function on the way of a request."""

    stage: int
    path: str  # of the file, from the root
    name: str  # Class.method or function
    num_lines: int  # 0: there is no such function


def hops() -> list[Hop]:
    """All hops of request_trace.txt, with the length of each function today."""
    parsed: dict[str, ast.Module] = {}
    found = []
    for line in TRACE.read_text().splitlines():
        stage, path, name = line.split()
        if path not in parsed:
            file = ROOT / path
            parsed[path] = ast.parse(file.read_text() if file.exists() else "")
        found.append(Hop(int(stage), path, name, _num_lines(parsed[path], name)))
    return found


def num_changes(way: list[Hop]) -> int:
    """How often the next function lies in another file."""
    return sum(one.path != other.path for one, other in itertools.pairwise(way))


def _num_lines(tree: ast.AST, name: str) -> int:
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = (n for n in ast.iter_child_nodes(tree) if isinstance(n, kinds) and n.name == part)
        node = next(named, None)
        if node is None:
            return 0
        tree = node
    return (tree.end_lineno or 0) - tree.lineno + 1 if isinstance(tree, kinds) else 0


def main() -> None:
    way = hops()
    files = {hop.path for hop in way}
    functions = {(hop.path, hop.name): hop.num_lines for hop in way}
    file_lines = sum(len((ROOT / path).read_text().splitlines()) for path in files)
    print(f"{len(way)} hops through {len(functions)} functions of {sum(functions.values())} lines")
    print(f"{len(files)} files of {file_lines} lines, {num_changes(way)} changes of file")


if __name__ == "__main__":
    main()
