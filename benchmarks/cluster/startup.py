"""How long `penstock serve` takes to be ready, by phase, and what memory it holds at rest.

Starts a server of its own on free ports, watches its output and the logs of its replicas, waits
until it has rested, reads every process from /proc, kills a worker and waits for the next one, and
ends it; again and again. Phases are marked
by lines that the server prints or logs, so that another checkout (`--against FOLDER`, the folder
with its `src`) can be measured in turn with this one, a start of each in each round. Memory is PSS:
a page that n processes share counts as 1/n of a page in each, so the sum is what the machine holds.
CPU seconds count all of a server's processes from their start to its being ready.

Linux: processes are read from /proc.

    python -m benchmarks.cluster.startup --starts 5
    python -m benchmarks.cluster.startup --starts 5 --against ../before --json startup.json
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import record
from penstock.deployments.bench.own_server import Server, started
from penstock.deployments.supervision.processes import descendants

TIME = re.compile(r"^\w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ", re.M)
# Where a phase ends: the process that logs it, and a part of its line. Nothing: its first line.
MARKS = (
    ("Ray and Serve's controller", "controller_", "Controller starting"),
    ("replicas are ordered", "controller_", "Starting Replica"),
    ("worker: process and imports of Serve", "Worker", "Started initializing replica"),
    ("worker: imports of torch, files checked", "Worker", "penstock.worker: model "),
    ("worker: weights read and packed", "Worker", "penstock.loader: "),
    ("worker: KV pool, warm-up", "Worker", "Finished initializing replica"),
    ("worker and ingress connected", "Worker", "ingress "),
)
ROLES = (  # a part of the command line, and the role
    ("penstock.deployments.cli", "driver"),
    (":Worker", "worker"),
    (":Ingress", "ingress"),
    ("GateServer", "gate"),
    ("Registry", "registry"),
    ("ServeController", "Serve's controller"),
    ("supervision.fork_server", "fork server"),
    ("gcs_server", "Ray: GCS"),
    ("DashboardAgent", "Ray: dashboard agent"),
    ("RuntimeEnvAgent", "Ray: runtime environment agent"),
    ("dashboard.py", "Ray: dashboard"),
    ("log_monitor.py", "Ray: log monitor"),
    ("monitor.py", "Ray: autoscaler monitor"),
    ("ray::IDLE", "Ray: idle worker"),
    ("/raylet/raylet", "Ray: raylet"),
)
REPLACED_S = 120.0
SIZES = ("num_processes", "total_pss_mb")
Row = dict[str, Any]


def start(model: str, flags: list[str], source: Path | None, rest_s: float) -> Row:
    """One start: seconds to ready and by phase, CPU seconds, and the processes at rest."""
    began_s = time.time()
    with started(model, flags, source) as server:
        ready_s = time.time() - began_s
        tree = [server.pid, *descendants(server.pid)]
        cpu = sum(_cpu_s(pid) for pid in tree)
        said = re.search(r"ready after ([\d.]+) s", server.output())
        assert said is not None, server.output()
        phases = _phases(began_s, server.folder, ready_s)
        time.sleep(rest_s)
        processes = _processes([server.pid, *descendants(server.pid)])
        replaced_s = _replaced_s(server)
    return {
        "ready_s": ready_s,
        "said_s": float(said[1]),
        "cpu_s": cpu,
        "phases_s": phases,
        "replaced_s": replaced_s,
        "pss_mb": processes,
        "num_processes": sum(len(each) for each in processes.values()),
        "total_pss_mb": sum(mb for each in processes.values() for mb in each),
    }


def _phases(began_s: float, folder: Path, ready_s: float) -> dict[str, float]:
    """Seconds of each phase, up to MARKS and then to ready."""
    logs = {
        path.name: path.read_text() for path in folder.glob("*/session_latest/logs/serve/*.log")
    }
    phases, last_s = {}, 0.0
    for phase, process, part in MARKS:
        lines = "\n".join(text for name, text in logs.items() if process in name).splitlines()
        found = [TIME.match(line) for line in lines if part in line]
        stamps = [_seconds(match[1]) for match in found if match is not None]
        at_s = max(last_s, min(stamps, default=began_s + last_s) - began_s)
        phases[phase], last_s = at_s - last_s, at_s
    return phases | {"the driver learns of it": ready_s - last_s}


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def _replaced_s(server: Server) -> float:
    """Seconds from the end of a worker by `kill -9` until the ingress is connected with the next.

    Serve looks for it every 2 s. Raises RuntimeError if none comes.
    """
    mark = MARKS[-1][2]

    def num_connected() -> int:
        logs = server.folder.glob("*/session_latest/logs/serve/*Worker*.log")
        return sum(mark in path.read_text() for path in logs)

    pids = descendants(server.pid)
    (worker, *_) = (pid for pid in pids if role_of(_command(pid)) == "worker")
    before = num_connected()
    os.kill(worker, signal.SIGKILL)
    began_s = time.monotonic()
    while num_connected() == before:
        if time.monotonic() > began_s + REPLACED_S:
            raise RuntimeError(f"no worker in place of the killed one:\n{server.output()}")
        time.sleep(0.02)
    return time.monotonic() - began_s


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


def _processes(pids: Iterable[int]) -> dict[str, list[float]]:
    """PSS in MB of each process, by role."""
    found: dict[str, list[float]] = {}
    for pid in pids:
        try:
            command, pss_mb = _command(pid), _pss_mb(pid)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        found.setdefault(role_of(command), []).append(pss_mb)
    return found


def role_of(command: str) -> str:
    """The role of a server's process with this command line."""
    if "/ray/" not in command and "ray::" not in command and "penstock" not in command:
        return "Ray: placeholder of an agent"
    return next((role for part, role in ROLES if part in command), command[:60])


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def summary(rows: list[Row]) -> Row:
    """Medians over the starts; of memory, the medians by role, of all processes that have it."""

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 2)

    roles = sorted({role for row in rows for role in row["pss_mb"]})
    by_role = {role: median(sum(row["pss_mb"].get(role, [0])) for row in rows) for role in roles}
    return {
        **{
            name: median(row[name] for row in rows)
            for name in ("ready_s", "said_s", "cpu_s", "replaced_s", *SIZES)
        },
        "phases_s": {
            phase: median(row["phases_s"][phase] for row in rows) for phase in rows[0]["phases_s"]
        },
        "pss_mb": dict(sorted(by_role.items(), key=lambda item: -item[1])),
    }


def table(summaries: dict[str, Row]) -> str:
    """All summaries side by side, in Markdown."""
    names = list(summaries)
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]

    def add(what: str, values: Iterable[Any], unit: str) -> None:
        cells = ["-" if value is None else f"{value:,.1f}{unit}" for value in values]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")

    add("**ready after the call**", (each["ready_s"] for each in summaries.values()), " s")
    add("ready, as the server says", (each["said_s"] for each in summaries.values()), " s")
    add("CPU until then", (each["cpu_s"] for each in summaries.values()), " s")
    for phase in next(iter(summaries.values()))["phases_s"]:
        add(phase, (each["phases_s"][phase] for each in summaries.values()), " s")
    add("a killed worker is replaced", (each["replaced_s"] for each in summaries.values()), " s")
    add("**memory at rest (PSS)**", (each["total_pss_mb"] for each in summaries.values()), " MB")
    for role in dict.fromkeys(role for each in summaries.values() for role in each["pss_mb"]):
        add(role, (each["pss_mb"].get(role) for each in summaries.values()), " MB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin", help="or a folder, or a file")
    parser.add_argument("--starts", type=int, default=5, help="of each checkout")
    parser.add_argument("--rest-s", type=float, default=5.0, help="before memory is read")
    parser.add_argument("--against", type=Path, help="root of another checkout, measured in turn")
    parser.add_argument("--flags", default="", help="of `penstock serve`, in one word")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    here = record.ROOT / "src"
    checkouts: dict[str, Path] = {"this checkout": here}
    if args.against is not None:
        if not (args.against / "src" / "penstock").is_dir():
            parser.error(f"--against: {args.against} has no src/penstock; give a checkout's root")
        checkouts = {"before": args.against / "src", "after": here}
    rows: dict[str, list[Row]] = {name: [] for name in checkouts}
    failed = dict.fromkeys(checkouts, 0)
    for number in range(args.starts):
        for name in list(checkouts) if number % 2 == 0 else list(reversed(checkouts)):
            try:
                row = start(args.model, args.flags.split(), checkouts[name], args.rest_s)
            except RuntimeError as error:  # on a busy machine Ray misses its own time limits
                failed[name] += 1
                print(f"{name}: {error}")
                continue
            rows[name].append(row)
            print(f"{name}: ready after {row['ready_s']:.1f} s, {row['cpu_s']:.1f} s of CPU")
        if all(rows.values()):
            tell(args, rows, failed, checkouts)


def tell(
    args: argparse.Namespace,
    rows: dict[str, list[Row]],
    failed: dict[str, int],
    checkouts: dict[str, Path],
) -> None:
    """Print and write what there is: after each round, as a run may be interrupted."""
    summaries = {name: summary(each) for name, each in rows.items()}
    print(f"\n{table(summaries)}\nload average {os.getloadavg()[1]:.0f}\n", flush=True)
    if args.json:
        content = {
            "commits": {name: record.commit(path) for name, path in checkouts.items()},
            "load_average": os.getloadavg()[1],
            "failed": failed,
            "summary": summaries,
            "starts": rows,
        }
        record.write(args.json, __file__, content)


if __name__ == "__main__":
    main()
