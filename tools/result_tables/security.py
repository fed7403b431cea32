"""Tables of hostile requests, of the review's findings, and of what a tenant can tell by time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.result_files import Result, fixed, markdown

ROLES = ("ingress", "worker", "gate", "registry")


def siege(result: Result) -> str:
    """Honest streams alone and besieged, memory by role, and how hostile requests ended."""
    seen = result.figures
    parts = {"alone": "honest streams alone", "besieged": "honest streams besieged"}
    head = ("honest streams", "answers", "wrong or failed", "between tokens p50", "p99", "TTFT p50")
    rows = [
        (
            name,
            str(seen[key]["answers"]),
            str(seen[key]["wrong or failed"]),
            fixed(seen[key]["between tokens ms"]["p50"], 1, " ms"),
            fixed(seen[key]["between tokens ms"]["p99"], 1, " ms"),
            fixed(seen[key]["to the first token ms"]["p50"], 1, " ms"),
        )
        for name, key in parts.items()
    ]
    about = (
        f"{seen['hostile requests']:,} hostile requests and "
        f"{seen['silent connections, each closed by the server']:,} silent connections in "
        f"{seen['honest streams besieged']['seconds']:.0f} s. p99 between tokens, besieged over "
        f"alone: {seen['p99 between tokens, besieged over alone']:.2f}. The same processes "
        f"throughout: {'yes' if seen['same processes'] else 'no'}; blocks held at the end: "
        f"{seen['blocks held at the end']}; outcomes that fail the run: "
        f"{len(seen['outcomes that fail the run'])}."
    )
    return "\n\n".join((about, markdown(head, rows), _memory(seen), _outcomes(seen["outcomes"])))


def grpc_resets(result: Result) -> str:
    """Memory of two gRPC servers after equal numbers of calls that were reset."""
    servers = result.figures["servers"]
    num_rounds = len(servers[0]["rss_mib"]) - 1
    calls = [f"{servers[0]['calls'] * i // num_rounds:,} calls" for i in range(1, num_rounds + 1)]
    rows = [(each["kind"], *(fixed(mib) for mib in each["rss_mib"])) for each in servers]
    return markdown(("MiB of a server in which", "ready", *calls), rows)


def _memory(seen: Mapping[str, Any]) -> str:
    sizes = seen["largest RSS by role MiB"]
    growth = seen["RSS growth in the second half of the siege, MiB an hour"]
    parts = ("calm", "siege", "second half of it", "after")
    rows = [
        (role, *(fixed(sizes[part].get(role), 0, " MiB") for part in parts), _slope(growth[role]))
        for role in ROLES
        if role in sizes["calm"]
    ]
    return markdown(("largest memory", *parts, "growth in the second half, an hour"), rows)


def _slope(growth: Mapping[str, float]) -> str:
    low, high = growth["low"], growth["high"]
    return f"{growth['per_hour']:+.0f} MiB ({low:+.0f} to {high:+.0f})"


def _outcomes(outcomes: Mapping[str, Mapping[str, int]]) -> str:
    rows = [
        (name, ", ".join(f"{outcome}: {number:,}" for outcome, number in found.items()))
        for name, found in outcomes.items()
    ]
    return markdown(("hostile requests", "how they ended"), rows)


def findings(result: Result) -> str:
    """Each attack of the review: what it did then, and what it does now."""
    head = ("finding", "attack", "then", "now")
    rows = [
        (row["name"], row["attack"], row["then"], row["after"].replace("|", "\\|"))
        for row in result.figures["findings"]
    ]
    return markdown(head, rows)


def tenant_timing(result: Result) -> str:
    """For each observer: the times of prompts that were sent and of new ones, and the AUC."""
    head = ("observer", "pairs", "sent, p50", "new, p50", "AUC (95 %)", "cached tokens seen")
    rows = []
    for name in ("another tenant", "the same tenant"):
        seen = result.figures[name]
        low, high = seen["95 % interval"]
        rows.append(
            (
                name,
                str(seen["sent prompts ms"]["n"]),
                fixed(seen["sent prompts ms"]["p50"], 2, " ms"),
                fixed(seen["new prompts ms"]["p50"], 2, " ms"),
                f"{seen['AUC']:.3f} ({low:.3f} to {high:.3f})",
                ", ".join(f"{what} ({n})" for what, n in sorted(seen["cached tokens"].items())),
            )
        )
    return markdown(head, rows)
