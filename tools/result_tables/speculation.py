"""Tables of speculation: tokens a second with drafts, by kind of text, and what drafts cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.result_files import Result, fixed, markdown

MODES = ("lookup", "suffix", "draft")
Rows = dict[tuple[str, int, str], dict[str, Any]]  # by text, requests and mode


def _rows(result: Result) -> Rows:
    return {(r["kind"], r["requests"], r["mode"]): r for r in result.figures["rows"]}


def speculation(results: Sequence[Result]) -> str:
    """Ratios within a round: the median of all rounds, the least and the greatest."""
    measured = {mode for result in results for _, _, mode in _rows(result)}
    modes = [mode for mode in MODES if mode in measured]
    head = ["weights", "requests", "text", "off, tokens/s"]
    for mode in modes:
        head += [mode, f"{mode}, tokens a step", f"{mode}, accepted of drafts"]
    rows = []
    for result in results:
        found = _rows(result)
        for kind, requests, mode in found:
            if mode == "off":
                drafted = [found.get((kind, requests, each)) for each in modes]
                own = found[kind, requests, mode]
                rows.append(
                    (
                        *(result.figures["weights"], requests, kind),
                        fixed(own["tokens_per_s"], 0),
                        *(cell for each in drafted for cell in _cells(each)),
                    )
                )
    return markdown(head, rows)


def _cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    spread = f"({fixed(row['ratio_low'], 2)} to {fixed(row['ratio_high'], 2)})"
    return (
        f"{fixed(row['ratio'], 2)}x {spread}",
        fixed(row["tokens_a_step"], 2),
        f"{row['accepted']} of {row['drafts']}",
    )


def proposer(result: Result) -> str:
    """Time and memory of finding drafts."""
    found = result.figures
    head = ("texts", "tokens each", "first search", "search, median", "p99", "own texts", "earlier")
    cells = (
        *(found["texts"], found["tokens"], fixed(found["first_ms"], 2, " ms")),
        *(fixed(found[name], 1, " µs") for name in ("propose_us", "propose_p99_us")),
        *(fixed(found[name] / 2**20, 1, " MiB") for name in ("own_bytes", "answer_bytes")),
    )
    return markdown(head, [cells])


def beside(result: Result) -> str:
    """Tokens a second of Penstock and of others on the same prompts; how many drafts were right."""
    found = _rows(result)
    own = [mode for mode in ("off", *MODES) if any(each == mode for _, _, each in found)]
    peers = list(dict.fromkeys(each for _, _, each in found if each not in own))
    head = ("requests", "text", *(f"Penstock {mode}" for mode in own), *peers)
    rows = []
    for requests, kind in dict.fromkeys((requests, kind) for kind, requests, _ in found):
        plain = found[kind, requests, "off"]["tokens_per_s"]
        cells = [str(requests), kind]
        for mode in (*own, *peers):
            row = found.get((kind, requests, mode))
            if row is None:
                cells.append("")
                continue
            notes = [] if mode == "off" else [f"{row['tokens_per_s'] / plain:.2f}x"]
            if row["drafts"]:
                notes.append(f"{row['accepted'] / row['drafts']:.0%}")
            note = f" ({', '.join(notes)})" if notes else ""
            cells.append(fixed(row["tokens_per_s"], 0) + note)
        rows.append(cells)
    return markdown(head, rows)
