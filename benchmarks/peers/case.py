"""A format of a system, which answers jobs (job.py) in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    """A format of a system: what runs it, and on which model."""

    system: str
    format: str
    python: str
    runner: str
    model: str
    bits: float
    mib: float
    settings: dict[str, Any] = field(default_factory=dict)
    preload: str = ""  # a library

    @property
    def name(self) -> str:
        return f"{self.system} {self.format}"

    def run(self, job: dict[str, Any]) -> Any:
        """The answer to a job of job.py. Raises RuntimeError where its process fails."""
        given = {"model": self.model, "settings": self.settings, **job}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            ran = subprocess.run(
                [self.python, "-m", f"benchmarks.peers.{self.runner}", str(out)],
                input=json.dumps(given),
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                env=os.environ | ({"LD_PRELOAD": self.preload} if self.preload else {}),
            )
            if ran.returncode or not out.exists():
                raise RuntimeError(f"{self.name} failed:\n{ran.stdout[-1000:]}{ran.stderr[-3000:]}")
            return json.loads(out.read_text())


def version_of(python: str, package: str) -> str:
    """Of a package in the environment of the interpreter `python`."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    ran = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return ran.stdout.strip()
