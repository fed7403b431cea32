"""Result files of the benchmarks: the envelope that each has, and the cells that tables are of.

A result file is `benchmarks/results/<benchmark>/<machine>[-variant].json`. Its envelope has the
benchmark (a module under `benchmarks`), the date, the commit that was measured (null where it was
not recorded), the commit that added the figures, the command, the machine, and either `results`
(what one run wrote) or `runs` (a list of them).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REQUIRED = ("benchmark", "date", "commit", "command", "machine")
MACHINE = ("cpu", "cores")
PAYLOADS = ("results", "runs")


class ResultError(ValueError):
    """A result file lacks a part of the envelope."""


@dataclass(frozen=True)
class Result:
    """One result file.

    path: relative to `benchmarks/results`, without `.json`, e.g. `offline/epyc-zen5-w1`.
    runs: what the benchmark wrote, once for each run; at least one.
    """

    path: str
    benchmark: str
    date: str
    commit: str | None
    command: str
    machine: Mapping[str, Any]
    runs: Sequence[Any]

    @property
    def figures(self) -> Any:
        """What the only, or the first, run wrote."""
        return self.runs[0]

    def provenance(self) -> str:
        """Machine, date, command and file, as one Markdown line."""
        cores, threads = self.machine["cores"], self.machine.get("threads")
        of_threads = f", {threads} compute thread{'s' * (threads != 1)}" if threads else ""
        commit = f", commit `{self.commit}`" if self.commit else ""
        command = self.command if "`" in self.command else f"`{self.command}`"
        return (
            f"{self.machine['cpu']}, {cores} cores{of_threads}; {self.date}{commit}; "
            f"[{self.path}.json](../../benchmarks/results/{self.path}.json). {command}"
        )


def parse(path: str, content: Mapping[str, Any]) -> Result:
    """Check the envelope of a file's content. Raises ResultError naming what is missing."""
    missing = [key for key in REQUIRED if key not in content]
    missing += [f"machine.{key}" for key in MACHINE if key not in content.get("machine", {})]
    if missing:
        raise ResultError(f"{path}.json lacks {', '.join(missing)}")
    payloads = [key for key in PAYLOADS if key in content]
    if len(payloads) != 1:
        raise ResultError(f"{path}.json must have either `results` or `runs`")
    payload = content[payloads[0]]
    runs = payload if payloads[0] == "runs" else [payload]
    if not runs or not all(runs):
        raise ResultError(f"{path}.json has no figures")
    envelope = {key: content[key] for key in REQUIRED}
    return Result(path=path, runs=runs, **envelope)


def load_all(folder: Path = RESULTS) -> dict[str, Result]:
    """All result files below `folder`, by path without suffix."""
    found = {}
    for file in sorted(folder.rglob("*.json")):
        path = file.relative_to(folder).with_suffix("").as_posix()
        found[path] = parse(path, json.loads(file.read_text()))
    return found


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Raises ValueError where a row's width is not that of the head."""
    lines = [_line(head), "|" + " --- |" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} cells under a head of {len(head)}: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def fixed(value: float | None, digits: int = 1, unit: str = "") -> str:
    """With thousands separated; empty for None. Zero has no sign."""
    if value is None:
        return ""
    text = f"{value:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.removeprefix("-")
    return text + unit


def signed(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "" if value is None else f"{value:+.{digits}f}{unit}"


def significant(value: float, digits: int = 3) -> str:
    """Rounded to that number of significant digits; integers above that keep all of theirs."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value))))
    return fixed(value, max(0, digits - whole) if abs(value) >= 1 else digits - 1)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}
