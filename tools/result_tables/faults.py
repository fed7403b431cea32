"""Tables of fault runs, and of what journals, TLS and traces cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.result_files import Result, fixed, markdown, signed

METRICS_PORT = "metrics port "  # begins the names of its paths


def journal_cost(result: Result) -> str:
    """Each figure with what the store adds to it."""
    columns = (
        ("TTFT p50", "ttft_p50_ms", 1),
        ("gap p50", "gap_p50_ms", 1),
        ("gap p99", "gap_p99_ms", 1),
        ("ingress CPU per token", "cpu_ms_per_token", 3),
    )
    return _costs(result, ("journals", "store", "off"), columns)


def tls_cost(result: Result) -> str:
    """Each figure with what TLS adds to it."""
    columns = (
        ("ingress CPU per token", "cpu_ms_per_token", 3),
        ("TTFT p50, one at a time", "ttft_alone_p50_ms", 1),
        ("a new connection", "connect_p50_ms", 1),
        ("its CPU at the ingress", "connect_cpu_ms", 2),
    )
    return _costs(result, ("connections", "way", "plain"), columns)


def trace_cost(result: Result) -> str:
    """What the spans of a request add to its CPU time at the ingress, the exporter's thread
    included."""
    columns = (("ingress CPU per request", "cpu_ms_per_request", 2),)
    return _costs(result, ("traces", "way", "off"), columns)


def _costs(
    result: Result, kinds: tuple[str, str, str], columns: Sequence[tuple[str, str, int]]
) -> str:
    """Each figure with what a kind adds to the base within a round: median and quartiles.

    `kinds`: title and key of the kind, and that of the base. `columns`: title, key and digits.
    """
    title_of_kind, key, base = kinds
    head = ["path", title_of_kind]
    for title, _, _ in columns:
        head += [title, "added (quartiles)"]
    rows = []
    for row in result.figures["rows"]:
        cells: list[str | None] = [row["path"], row[key]]
        for _, name, digits in columns:
            added = None if row[key] == base else _added(row[f"added_{name}"], digits)
            cells += [fixed(row[name], digits, " ms"), added]
        rows.append(cells)
    loads = [each["load"] for each in result.figures["rounds"]]
    about = f"Load averages of the machine before the rounds: {min(loads):.1f} to {max(loads):.1f}."
    return f"{markdown(head, rows)}\n\n{about}"


def _added(quartiles: Sequence[float], digits: int) -> str:
    low, middle, high = (signed(each, digits) for each in quartiles)
    return f"{middle} ms ({low}, {high})"


def kills(result: Result) -> str:
    """Of random_kills, with and without --cluster."""
    figures = result.figures
    rows = [
        (name, _inline(figures[name]))
        for name in (
            *("kills", "kills by role", "of these stopped first", "calls", "requests continued"),
            *("differing answers", "lost requests", "blocks held at the end"),
        )
        if name in figures
    ]
    pauses = figures.get("pauses s, by role") or {"worker": figures["pauses s"]}
    return f"{markdown(('', 'number'), rows)}\n\n{_pauses(pauses)}"


def _pauses(by_role: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (role, each["n"], *(fixed(each[name], 2, " s") for name in ("p50", "p99", "max")))
        for role, each in by_role.items()
    ]
    return markdown(("killed", "pauses", "p50", "p99", "longest"), rows)


def _inline(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number}" for key, number in value.items()) or "0"
    return str(value)


def overload(result: Result) -> str:
    figures = result.figures
    rows = []
    for phase, load in figures["loads"].items():
        took, refusals = load["TTFT of whole answers s"], load["a refusal took s"]
        found = figures["health"][phase]
        slowest = [each["ms"] for path, each in found.items() if path.startswith("/")]
        aside = [each["ms"] for path, each in found.items() if path.startswith(METRICS_PORT)]
        rows.append(
            (
                phase,
                fixed(load["offered a second"], 1),
                fixed(load["goodput a second"], 1),
                _inline(load["ends"]),
                fixed(took["p50"], 2, " s"),
                fixed(took["p99"], 2, " s"),
                fixed(refusals["p99"], 2, " s"),
                *(fixed(_most(slowest, name), 0, " ms") for name in ("p50", "p99", "max")),
                *(fixed(_most(aside, name), 0, " ms") for name in ("p99", "max")),
                fixed(sum(figures["largest RSS by role MiB"][phase].values()), 0, " MiB"),
            )
        )
    head = (
        *("load", "offered/s", "goodput/s", "requests by end", "TTFT p50", "p99"),
        *("refused within, p99", "health p50", "p99", "longest"),
        *("of the metrics port p99", "longest", "RSS of all"),
    )
    recovered_s = figures["recovery s"]
    end = "not within the time" if recovered_s is None else f"after {recovered_s} s"
    about = (
        f"Sustainable: {figures['sustainable answers a second']} answers/s; under overload "
        f"{100 * figures['goodput under overload, share of it']:.0f} % of it; recovered {end}. "
        "Health is the slowest of /health, /ready and /live."
    )
    return f"{markdown(head, rows)}\n\n{about}"


def _most(summaries: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    values = [value for each in summaries if (value := each[name]) is not None]
    return max(values, default=None)


def soak(result: Result) -> str:
    rows = [
        (
            row["role"],
            row["figure"],
            row["processes"],
            fixed(row["median"], 1),
            _slope(row["while it lives"]),
            _slope(row["from process to process"]),
        )
        for row in result.figures["slopes"]
    ]
    head = (
        *("role", "figure", "processes", "median"),
        *("an hour, while it lives (95 %)", "an hour, from process to process (95 %)"),
    )
    return f"{_about_soak(result.figures)}\n\n{markdown(head, rows)}"


def _about_soak(figures: Mapping[str, Any]) -> str:
    names = ("seconds", "kills by role", "calls", "differing answers", "lost requests")
    return "; ".join(f"{name}: {_inline(figures[name])}" for name in names) + "."


def _slope(slope: Mapping[str, float] | None) -> str | None:
    if slope is None:
        return None
    low, middle, high = (signed(slope[name], 1) for name in ("low", "per_hour", "high"))
    return f"{middle} ({low}, {high})"


def fault_table(result: Result) -> str:
    """All rows that were run; each says what it is about."""
    rows = [
        (
            row["row"],
            f"**{row['title']}**: {row['injected']}",
            row["promised"],
            row["seen"],
            f"{row['verdict']} ({row['scale']})",
        )
        for row in result.figures["rows"]
    ]
    return markdown(("#", "injected", "promised", "seen", "verdict"), rows)
