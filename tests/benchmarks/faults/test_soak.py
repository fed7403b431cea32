"""The table of a soak: what is called flat, and what is marked."""

from __future__ import annotations

import random

from benchmarks.faults.figures import Sample
from benchmarks.faults.soak import slopes, table
from benchmarks.faults.watch import CLUSTER


def test_a_leak_is_marked_and_a_flat_line_is_not() -> None:
    rng = random.Random(1)
    samples = []
    for step in range(120):
        at_s = 10.0 * step
        values = {
            "rss_mib": 200.0 + rng.gauss(0, 1),
            "descriptors": 40.0 + step // 4,
            "threads": 9.0,
        }
        samples.append(Sample(at_s, at_s, "ingress", 1, values))
        shared = {"live_blocks": rng.uniform(0, 50), "shm_mib": 30.0, "shm_files": 4.0}
        samples.append(Sample(at_s, at_s, CLUSTER, 0, shared))
    rows = {(row["role"], row["figure"]): row for row in slopes(samples, 60.0)}
    assert rows["ingress", "rss_mib"]["while it lives"]["is_flat"]
    assert rows["ingress", "threads"]["while it lives"]["per_hour"] == 0.0
    leak = rows["ingress", "descriptors"]["while it lives"]
    assert not leak["is_flat"]
    assert 85 < leak["per_hour"] < 95
    assert rows["ingress", "descriptors"]["from process to process"] is None  # there was but one
    lines = table(list(rows.values())).splitlines()
    (marked,) = (line for line in lines if line.endswith("* | - |"))
    assert marked.startswith("| ingress | descriptors | 1 |")
