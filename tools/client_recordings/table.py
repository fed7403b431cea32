"""The table of docs/reference/clients.md: each client, where it sends to, and what is ignored.

Made of the recordings, which tests/deployments/ingress/http/test_recorded_clients.py replays: a
body that is not served, or of which another field is ignored, fails there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "tests/deployments/ingress/http/clients"
HEAD = ("client", "endpoint", "bodies", "streams", "result of a tool", "ignored fields")


def rows(folder: Path = FOLDER) -> list[tuple[str, ...]]:
    """One row for each client and endpoint: recorded ones, then those written after sources."""
    recorded = [_read(path) for path in sorted((folder / "recorded").glob("*.json"))]
    written = [_as_recording(_read(path)) for path in sorted(folder.glob("*.json"))]
    return [row for recording in (*recorded, *written) for row in _rows_of(recording)]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")), file=path.stem)


def _as_recording(single: Mapping[str, Any]) -> dict[str, Any]:
    """A file with one body, which was written by hand, in the form of a recording."""
    return {"client": single["file"], "version": "written", "exchanges": [single]}


def _rows_of(recording: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for each in recording["exchanges"]:
        by_path.setdefault(each["path"].partition("?")[0], []).append(each)
    for path, exchanges in by_path.items():
        bodies = [each["body"] for each in exchanges]
        ignored = sorted({name for each in exchanges for name in each.get("ignored", ())})
        yield (
            f"{recording['client']} {recording['version']}",
            f"`{path}`",
            str(len(bodies)),
            _yes(body.get("stream") for body in bodies),
            _yes(has_result(body) for body in bodies),
            ", ".join(f"`{name}`" for name in ignored),
        )


def _yes(values: Iterable[Any]) -> str:
    return "yes" if any(values) else ""


def has_result(body: Mapping[str, Any]) -> bool:
    """Whether the conversation holds the result of a call of a tool, in any of the APIs."""
    turns = [body.get("messages"), body.get("input")]
    for turn in (turn for each in turns if isinstance(each, list) for turn in each):
        content = turn.get("content")
        parts = content if isinstance(content, list) else []
        if turn.get("role") == "tool" or str(turn.get("type")).endswith("_call_output"):
            return True
        if any(part.get("type") == "tool_result" for part in parts):
            return True
    return False
