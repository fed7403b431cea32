"""Run the fault table.

    python -m benchmarks.faults.table                       all rows
    python -m benchmarks.faults.table --rows 1,3-5 --quick  some, with fewer repetitions
    python -m benchmarks.faults.table --json FILE           and write what was seen

Rows that FILE has already, and that are not run again, stay in it. Exit status 1: a row failed.
Rows that this machine cannot run are named, and fail nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import record
from benchmarks.faults.table import (
    clients,
    clock,
    hostile,
    live,
    load,
    machine,
    network,
    state,
    workers,
)
from benchmarks.faults.table.mutations import MUTATIONS
from benchmarks.faults.table.rows import ROWS, Outcome, Scale, outcome_of

PROGRAM = str(Path(__file__).parent)
FILES = (workers, network, clients, hostile, state, load, machine, live)  # imported for their rows


def chosen(text: str | None) -> list[int]:
    """The rows that e.g. `1,3-5` names; None: all. Raises ValueError for an unknown one."""
    if text is None:
        return sorted(ROWS)
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if unknown := sorted(set(numbers) - set(ROWS)):
        raise ValueError(
            f"there is no row {unknown[0]}; rows are {', '.join(map(str, sorted(ROWS)))}"
        )
    return numbers


def run(numbers: Sequence[int], scale: Scale, file: Path | None = None) -> list[Outcome]:
    """Run rows one after another; print each as it ends, and write it to `file`."""
    outcomes = []
    for number in numbers:
        print(f"row {number}: {ROWS[number].title}", flush=True)
        outcome = asyncio.run(outcome_of(ROWS[number], scale))
        print(f"  {outcome.verdict} in {outcome.seconds:.1f} s; {outcome.seen.text()}", flush=True)
        outcomes.append(outcome)
        if file is not None:
            record.write(file, PROGRAM, {"rows": _with_earlier(file, outcomes, scale)})
        gc.collect()
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """All rows under a head, as Markdown."""
    lines = ["| # | fault | injected | promised | seen | |", "|---|---|---|---|---|---|"]
    for each in outcomes:
        cells = (each.row.title, each.row.injected, each.row.promised, each.seen.text())
        lines.append(f"| {each.row.number} | {' | '.join(cells)} | {each.verdict} |")
    return "\n".join(lines)


def _with_earlier(file: Path, outcomes: Sequence[Outcome], scale: Scale) -> list[dict[str, Any]]:
    """The rows of the file, in place of which these come."""
    rows: dict[int, dict[str, Any]] = {}
    if file.exists():
        rows = {each["row"]: each for each in json.loads(file.read_text())["results"]["rows"]}
    about = {"scale": "quick" if scale.is_quick else "full", "commit": record.commit()}
    rows |= {each.row.number: each.as_dict() | about for each in outcomes}
    return [rows[number] for number in sorted(rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="numbers and ranges, e.g. 1,3-5; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--mutate", choices=sorted(MUTATIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        numbers = chosen(options.rows)
    except ValueError as error:
        parser.error(f"--rows: {error}")
    if 21 in numbers:
        clock.preload()
    scale = Scale(options.quick, options.seed)
    if options.mutate:
        with MUTATIONS[options.mutate]():
            outcomes = run(numbers, scale, options.json)
    else:
        outcomes = run(numbers, scale, options.json)
    print(f"\n{table(outcomes)}")
    return int(any(each.passed is False for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
