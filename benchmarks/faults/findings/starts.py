"""Starts that must be refused, as a command and as an application: V16, V18, V20 of the review."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.common import record
from benchmarks.faults.findings.server import Finding
from penstock.deployments.bench.own_server import free_port

SERVE = (sys.executable, "-m", "penstock.deployments.cli", "serve", "builtin")
# As `serve deploy` and KubeRay make it.
APPLICATION = (
    sys.executable,
    "-c",
    "import sys; from penstock.deployments.app import build_app; "
    "build_app({'model': 'builtin', 'host': '0.0.0.0'})",
)
WITHIN_S = 120.0


@dataclass(frozen=True)
class Start:
    name: str
    attack: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


def starts() -> list[Start]:
    ports = [f"--{name}-port={free_port()}" for name in ("http", "grpc", "metrics")]
    foreign = {"RAY_AUTH_MODE": "disabled"}
    digest = "0" * 16 + "-" + "0" * 16
    return [
        Start("V16", "Ray's token authentication switched off", [*SERVE, *ports], foreign),
        Start("V18 A", "beyond loopback without keys", [*SERVE, *ports, "--host", "0.0.0.0"]),
        Start("V18 B", "the same as an application", APPLICATION),
        Start("V20", "other model files", [*SERVE, *ports, "--model-digest", digest]),
    ]


def run() -> Iterator[Finding]:
    for each in starts():
        with tempfile.TemporaryDirectory(prefix="pst-", dir="/tmp") as folder:
            environment = {
                **os.environ,
                "TMPDIR": folder,
                "XDG_STATE_HOME": folder,
                **each.environment,
            }
            began_s = time.monotonic()
            done = subprocess.run(
                each.command,
                capture_output=True,
                text=True,
                env=environment,
                timeout=WITHIN_S,
                check=False,
            )
            took_s = time.monotonic() - began_s
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if not line.startswith(" ")), "")
        said = said.replace(f"{record.ROOT}/", "")
        after = f"status {done.returncode} after {took_s:.1f} s: {said[:160]}"
        yield Finding(each.name, each.attack, after, {"status": done.returncode, "said": said})
