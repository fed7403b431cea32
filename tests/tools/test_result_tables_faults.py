"""The tables of fault runs, of results as the programs make them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cluster import journal_cost
from benchmarks.faults import figures
from benchmarks.faults.overload import METRICS_PORT, PHASES, Phase, about, health
from benchmarks.faults.soak import slopes
from benchmarks.faults.watch import HEALTH_PATHS, Probe
from penstock.deployments.bench.figures import Chunk, Outcome
from penstock.deployments.bench.load import Job
from tools.result_files import Result, parse
from tools.result_tables import faults as tables

ENVELOPE = {
    "benchmark": "faults.soak",
    "date": "2026-01-02",
    "commit": None,
    "command": "python -m benchmarks.faults.soak",
    "machine": {"cpu": "a CPU", "cores": 2},
}


def made_up(results: dict[str, Any]) -> Result:
    return parse("faults/made-up", ENVELOPE | {"results": results})


def cells(line: str) -> list[str]:
    return [each.strip() for each in line.strip("|").split("|")]


def test_journals_are_compared_within_a_round() -> None:
    """A busy round is slow for all of them, and adds nothing to what one of them costs."""
    rows: list[dict[str, Any]] = []
    for number, busy in enumerate((0.0, 50.0, 1.0), 1):
        for path in journal_cost.PATHS:
            for store, cost in zip(journal_cost.STORES, (0.0, 0.1, 2.0, 3.0)):
                names = ("cpu_ms_per_token", "ttft_p50_ms", "gap_p50_ms", "gap_p99_ms")
                row = dict.fromkeys(names, 10.0 + busy + cost)
                rows.append({"round": number, "path": path, "store": store, "load": busy} | row)
    summary = journal_cost.summary(rows)
    lines = tables.journal_cost(made_up({"rows": summary, "rounds": rows})).splitlines()
    assert cells(lines[2])[:4] == ["HTTP, SSE", "off", "11.0 ms", ""]
    assert cells(lines[4])[:4] == ["HTTP, SSE", "SQLite", "13.0 ms", "+2.0 ms (+2.0, +2.0)"]
    assert cells(lines[9])[:4] == ["gRPC", "Redis", "14.0 ms", "+3.0 ms (+3.0, +3.0)"]
    assert lines[-1].endswith("0.0 to 50.0.")


def test_kills_of_both_kinds() -> None:
    shared = {"kills": 3, "calls": 9, "differing answers": 0, "lost requests": {}}
    shared |= {"blocks held at the end": 0}
    pauses = figures.summary([0.5, 1.0, 4.0])
    text = tables.kills(made_up({**shared, "requests continued": 3, "pauses s": pauses}))
    assert "| worker | 3 | 1.00 s | 4.00 s | 4.00 s |" in text
    by_role = {"gate": figures.summary([]), "ingress": pauses}
    roles = {"kills by role": {"gate": 1, "ingress": 2}, "pauses s, by role": by_role}
    text = tables.kills(made_up({**shared, **roles}))
    assert "| kills by role | gate 1, ingress 2 |" in text
    assert "| gate | 0 |  |  |  |" in text
    assert "| lost requests | 0 |" in text


def test_overload_has_a_row_for_each_phase() -> None:
    phases = []
    for number, name in enumerate(PHASES):
        began_s = 10.0 * number
        whole = Outcome(Job(0.0, 8, 8), began_s, began_s + 2, chunks=[Chunk(began_s + 0.5, 1, 1)])
        refused = Outcome(Job(0.0, 8, 8), began_s, began_s + 0.1, error="429 overloaded")
        phases.append(Phase(name, 1.0, began_s, began_s + 10.0, [whole, refused]))
    probes = [
        Probe(float(at_s), prefix + path, 200, took_s * (1 + at_s))
        for at_s in np.arange(0, 30)
        for prefix, took_s in (("", 0.002), (METRICS_PORT, 0.001))
        for path in HEALTH_PATHS
    ]
    text = tables.overload(
        made_up(
            {
                "sustainable answers a second": 4.0,
                "goodput under overload, share of it": 0.9,
                "recovery s": 1.5,
                "loads": {each.name: about(each, 10.0) for each in phases},
                "health": {each.name: health(probes, each) for each in phases},
                "largest RSS by role MiB": {
                    name: {"worker": 400.0, "gate": 50.0} for name in PHASES
                },
            }
        )
    )
    row = cells(text.splitlines()[3])
    assert row[:4] == ["overload", "0.2", "0.1", "whole 1, 429 overloaded 1"]
    assert row[-4:] == ["40 ms", "20 ms", "20 ms", "450 MiB"]
    assert "under overload 90 % of it; recovered after 1.5 s" in text


def test_soak_shows_both_kinds_of_growth() -> None:
    samples = [
        figures.Sample(10.0 * n, 10.0 * n, "gate", 1, {"rss_mib": 50.0 + n, "threads": 9.0})
        for n in range(60)
    ]
    results = {"seconds": 600, "kills by role": {"gate": 1}, "calls": 5, "differing answers": 0}
    results |= {"lost requests": {}, "slopes": slopes(samples, 0.0)}
    lines = tables.soak(made_up(results)).splitlines()
    assert lines[0].startswith("seconds: 600; kills by role: gate 1; calls: 5")
    (row,) = (cells(line) for line in lines if line.startswith("| gate | rss_mib"))
    assert row[2:] == ["1", "79.0", "+360.0 (+360.0, +360.0)", ""]


def test_each_row_of_the_fault_table_has_its_verdict() -> None:
    row = {"row": 3, "title": "Worker hangs", "injected": "SIGSTOP", "promised": "equal ids"}
    row |= {"seen": "answers compared: 4", "verdict": "pass", "scale": "quick"}
    lines = tables.fault_table(made_up({"rows": [row]})).splitlines()
    assert cells(lines[2]) == [
        *("3", "**Worker hangs**: SIGSTOP", "equal ids", "answers compared: 4", "pass (quick)")
    ]
