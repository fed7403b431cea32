"""Tables of speculation: tokens a second with drafts, by kind of text, and what drafts cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.result_files import Result, fixed, markdown

MODES = ("lookup", "suffix")


def speculation(results: Sequence[Result]) -> str:
    """Ratios within a round: the median of all rounds, the least and the greatest."""
    head = ["weights", "requests", "text", "off, tokens/s"]
    for mode in MODES:
        head += [mode, f"{mode}, tokens a step", f"{mode}, accepted of drafts"]
    rows = []
    for result in results:
        found = {(r["kind"], r["requests"], r["mode"]): r for r in result.figures["rows"]}
        for kind, requests, mode in found:
            if mode == "off":
                drafted = [found[kind, requests, each] for each in MODES]
                own = found[kind, requests, mode]
                rows.append(
                    (
                        *(result.figures["weights"], requests, kind),
                        fixed(own["tokens_per_s"], 0),
                        *(cell for each in drafted for cell in _cells(each)),
                    )
                )
    return markdown(head, rows)


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
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


PEERS = ("llama.cpp off", "llama.cpp lookup 2", "llama.cpp lookup 10")


def beside(result: Result) -> str:
    """Tokens a second for one request, of Penstock and of llama.cpp on the same prompts."""
    found = {(r["kind"], r["mode"]): r for r in result.figures["rows"]}
    modes = ("off", *MODES)
    head = ("text", *(f"Penstock {mode}" for mode in modes), *PEERS)
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        own = found[kind, "off"]["tokens_per_s"]
        cells = [kind]
        for mode in (*modes, *PEERS):
            row = found.get((kind, mode))
            rate = "" if row is None else fixed(row["tokens_per_s"], 0)
            of_own = "" if row is None or mode == "off" else f" ({row['tokens_per_s'] / own:.2f}x)"
            cells.append(rate + of_own)
        rows.append(cells)
    return markdown(head, rows)
