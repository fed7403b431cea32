"""Writes a result file: the figures of one run, in the envelope that `benchmarks/results` has.

The envelope names the benchmark, the date, the commit, the command and the machine. What a program
writes with `--json`, `--out` or `--record` can be put into `benchmarks/results` as it is;
`tools/result_files.py` checks the envelope, and `tools/render_results.py` makes tables of it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock.workers.evaluation.machine import cpu_name

ROOT = Path(__file__).resolve().parents[2]
# Where a run writes does not change its figures.
OUTPUTS = ("--json", "--out", "--plot", "--record")


def write(
    path: Path,
    program: str,
    results: Mapping[str, Any],
    *,
    threads: int | None = None,
) -> None:
    """Write `results` with their envelope to `path` as JSON; missing folders are made.

    program: `__file__` of the benchmark.
    threads: compute threads, where the benchmark sets their number.
    Raises ValueError for empty results.
    """
    if not results:
        raise ValueError(f"{path}: a result file needs figures, and `results` is empty")
    content = envelope(program, threads, sys.argv[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "results": results}, indent=1) + "\n")


def envelope(program: str, threads: int | None, arguments: Sequence[str]) -> dict[str, Any]:
    """All of a result file but its figures."""
    parts = Path(program).resolve().relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
    machine: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "benchmark": module.removeprefix("benchmarks."),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *_reproducible(arguments)]),
        "machine": machine if threads is None else machine | {"threads": threads},
    }


def commit(folder: Path | None = None) -> str | None:
    """The commit of a checkout (None: of this one), with `-dirty` where tracked files differ.

    None outside git.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=folder or ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _reproducible(arguments: Sequence[str]) -> list[str]:
    """Without the outputs, and of absolute paths only the last part."""
    kept: list[str] = []
    is_output = False
    for argument in arguments:
        if is_output or argument in OUTPUTS:
            is_output = not is_output
        elif not argument.startswith(tuple(f"{name}=" for name in OUTPUTS)):
            kept.append(Path(argument).name if os.path.isabs(argument) else argument)
    return kept
