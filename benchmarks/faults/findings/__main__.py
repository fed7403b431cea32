"""Each finding of the security review, attacked again on today's code.

    python -m benchmarks.faults.findings --json out.json

The figures of then are those of the review's own programs at commit bd3be86, whose classes are no
more; the attacks are the same. Where a server is attacked, it is a live `penstock serve` with one
worker and one ingress. `/live` is what a neighbour waits for meanwhile: the event loop's delay.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import record
from benchmarks.faults.findings import before_a_key, costly, processes, starts, tenants
from benchmarks.faults.findings.server import Finding, server_with_keys

THEN = {
    "V1 A": "128 MiB taken, +150 MiB, then 401",
    "V1 B": "16 MiB taken, +482 MiB",
    "V1 C": "48 MiB taken, /live 900 ms",
    "V2 A": "the loop stood for 1,120 ms",
    "V2 B": "the loop stood for 11 s; the neighbour's stream ended with worker_lost",
    "V3": "cached_tokens 352, 16, 32",
    "V4": "token, epoch and prompt heard after 0.1 s; the client got the listener's answer",
    "V5 A": "5.0 s",
    "V5 B": "invalid_value, and again, for hours",
    "V6 A": "all open, for ever",
    "V6 B": "/live cut with 60 connections on 40 descriptors",
    "V7": "42 MiB, RSS +380 to +470 MiB",
    "V8": "27 to 309 ms a token",
    "V9 A": "the loop stood for 2,150 ms",
    "V9 B": "the loop stood for 650 ms",
    "V9 C": "the loop stood for 260 ms",
    "V10": "both connected 0 % of the time; state thrown away 23 times in 5 s",
    "V11": "healthy for ever, 99 % of a core",
    "V12": "200 and 200",
    "V13": "gone after 18",
    "V14": "left for ever",
    "V15": "2,000 watch, 18 % of a core",
    "V16": "started",
    "V17": "every key saw all requests, with a digest of the tenant's key",
    "V18 A": "started, with a warning",
    "V18 B": "started, without a word",
    "V19": "500, a traceback in the log",
    "V20": "no digests: started",
    "V21": "none",
    "V22": "the gate threw its state away at every tick",
}


def findings() -> Iterator[Finding]:
    yield from processes.run()
    yield from starts.run()
    with server_with_keys() as server:
        yield from before_a_key.run(server)
        yield from costly.run(server)
        yield from tenants.run(server)
    yield from tenants.without_keys()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    rows = []
    for each in findings():
        rows.append({**asdict(each), "then": THEN[each.name]})
        print(
            f"{each.name}: {each.attack}\n  then: {THEN[each.name]}\n  now:  {each.after}",
            flush=True,
        )
    rows.sort(key=lambda row: (int(row["name"].split()[0][1:]), row["name"]))
    if args.json:
        record.write(args.json, __file__, {"findings": rows}, threads=1)


if __name__ == "__main__":
    main()
