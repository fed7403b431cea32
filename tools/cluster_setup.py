"""The commands of cluster.yaml for a new machine, executed: file mounts, setup, start, deployment.

    python -m tools.cluster_setup --record benchmarks/results/cluster-setup/x86-64.json

A scratch folder is the home of the new machine. Commands run in login shells, as `ray up` runs them
over SSH: a real venv, a real `pip install` of this repository, Ray's start commands with that venv.
Recorded and not executed are `sudo apt-get` and `ray stop`; `sudo install` writes below the scratch
folder. The nodes get ports of their own, and CPUs in place of a GPU; the deployment gets the
built-in model. What was seen is written down. Takes minutes, and needs the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config

from benchmarks.common import record
from penstock.deployments.supervision.processes import descendants, end
from tools.clean_root import status
from tools.result_files import ROOT

READY_S = 600.0
KEY = "of-the-cluster"
# What the shim of sudo does: records, and installs files below the scratch folder.
SUDO = """#!/bin/sh
echo "$*" >> "$SCRATCH/sudo.log"
[ "$1" = install ] || exit 0
for last; do :; done
mkdir -p "$SCRATCH/root$(dirname "$last")"
cp ~/.penstock/api-keys "$SCRATCH/root$last" && chmod 600 "$SCRATCH/root$last"
"""


@dataclass(frozen=True, slots=True)
class Step:
    """An executed command, and how long it took."""

    command: str
    seconds: float


class Machine:
    """A machine that `ray up` sets up: a scratch home, and shims before PATH."""

    def __init__(self, scratch: Path, port: int):
        self.scratch, self.home, self.port = scratch, scratch / "home", port
        self.steps: list[Step] = []
        self.started: list[subprocess.Popen[bytes]] = []
        shims = scratch / "shims"
        for folder in (self.home, shims):
            folder.mkdir()
        (shims / "sudo").write_text(SUDO)
        (shims / "sudo").chmod(0o755)
        # A login shell makes its own PATH, by /etc/profile, before it reads this.
        (self.home / ".bash_profile").write_text("export PATH=$SCRATCH/shims:$PATH\n")
        kept = ("PIP_", "SSL_", "REQUESTS_", "LANG")  # how this machine reaches the index
        self._environment = {
            **{name: value for name, value in os.environ.items() if name.startswith(kept)},
            **{"HOME": str(self.home), "USER": "root", "SCRATCH": str(scratch)},
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "XDG_CACHE_HOME": str(scratch / "cache"),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{port + 3}",
            "RAY_HEAD_IP": "127.0.0.1",
        }

    def mount(self, mounts: Mapping[str, str], excluded: list[str]) -> None:
        """Copy what `file_mounts` names, as rsync would. In ~ lie files of the operator."""
        began_s = time.monotonic()

        def left_out(folder: str, names: list[str]) -> list[str]:
            patterns = [each.rpartition("/")[2] for each in excluded]
            return [name for name in names if any(fnmatch(name, each) for each in patterns)]

        secrets_of = {"~/.ray/auth_token": secrets.token_hex(32), "~/.penstock/api-keys": KEY}
        for target, source in mounts.items():
            to = self.home / target.removeprefix("~/")
            to.parent.mkdir(parents=True, exist_ok=True)
            if source in secrets_of:
                to.write_text(secrets_of[source])
                to.chmod(0o600)
            else:
                shutil.copytree(ROOT / source, to, symlinks=True, ignore=left_out)
        self.steps.append(Step("file_mounts", round(time.monotonic() - began_s, 1)))

    def _shell(self, command: str) -> list[str]:
        return ["bash", "--login", "-c", "-i", f"source ~/.bashrc 2>/dev/null; ({command})"]

    def run(self, command: str) -> None:
        """A command to its end. Raises CalledProcessError."""
        began_s = time.monotonic()
        subprocess.run(
            self._shell(command),
            env=self._environment,
            cwd=self.home,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        self.steps.append(Step(command, round(time.monotonic() - began_s, 1)))
        print(f"{command[:90]} ({self.steps[-1].seconds} s)", file=sys.stderr, flush=True)

    def start(self, command: str, *flags: str) -> None:
        """`ray start`, kept in the foreground, with flags that keep it apart on this machine."""
        self.steps.append(Step(command, 0.0))
        apart = ("--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--block")
        own = command.replace("6379", str(self.port))
        with open(self.scratch / f"ray-{len(self.started)}.log", "wb") as log:
            process = subprocess.Popen(
                self._shell(f"{own} {shlex.join([*flags, *apart])}"),
                env=self._environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)

    def stop(self) -> None:
        pids = [pid for each in self.started for pid in (each.pid, *descendants(each.pid))]
        end(pids, 10.0)
        for process in self.started:
            process.wait()

    def show_logs(self) -> None:
        """Print the end of each log of Ray's processes, so that a failure can be explained."""
        for path in sorted(self.scratch.glob("ray-*.log")):
            print(f"{path.name}:\n{path.read_text()[-2000:]}", file=sys.stderr)

    def recorded(self) -> list[str]:
        """The commands that sudo was asked for, with ~ for the scratch home."""
        text = (self.scratch / "sudo.log").read_text()
        return text.replace(str(self.home), "~").splitlines()


def autoscaler_config() -> dict[str, Any]:
    """What `ray up` puts on the head, here of an autoscaler that starts no node."""
    provider = {
        "type": "readonly",
        "use_node_id_as_ip": True,
        "disable_launch_config_check": True,
    }
    given = {"cluster_name": "penstock", "max_workers": 0, "provider": provider}
    return dict(prepare_config(given))


def set_up(machine: Machine, cluster: Mapping[str, Any]) -> None:
    """What `ray up` does on the head, before Ray starts there."""
    machine.mount(cluster["file_mounts"], cluster["rsync_exclude"])
    for command in (*cluster["setup_commands"], *cluster["head_setup_commands"]):
        machine.run(command)
    (machine.home / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(autoscaler_config()))
    file = machine.home / "penstock" / "deployments" / "serve.yaml"
    deploy = yaml.safe_load(file.read_text())
    keys = machine.scratch / "root" / "etc" / "penstock" / "api-keys"
    assert deploy["applications"][0]["args"]["api_keys_file"] == "/etc/penstock/api-keys"
    deploy["applications"][0]["args"] |= {
        **{"model": "builtin", "device": "cpu", "num_workers": 1, "cpus_per_worker": 1},
        **{"http_port": machine.port + 1, "grpc_port": machine.port + 2, "metrics_port": 0},
        "api_keys_file": str(keys),
    }
    file.write_text(yaml.safe_dump(deploy))


def start(machine: Machine, cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Head, a node for a worker, and the deployment: what clients see."""
    stop, start_head, wait, deploy = cluster["head_start_ray_commands"]
    also_stop, start_node = cluster["worker_start_ray_commands"]
    assert stop == also_stop == "ray stop"
    port = machine.port
    machine.start(
        start_head,
        *("--num-cpus=0", '--resources={"penstock_ingress": 1}'),
        *(f"--dashboard-port={port + 3}", f"--dashboard-agent-listen-port={port + 4}"),
        f"--temp-dir={machine.scratch / 'r'}",
    )
    machine.run(wait)
    machine.start(start_node, "--num-cpus=1", "--dashboard-agent-listen-port=0")
    machine.run(deploy)
    url, began_s = f"http://127.0.0.1:{port + 1}", time.monotonic()
    while status(f"{url}/ready", KEY)[0] != 200:
        if time.monotonic() - began_s > READY_S:
            raise SystemExit("not ready")
        time.sleep(0.5)
    body = {"model": "builtin", "prompt": "The sea was", "max_tokens": 8}
    code, answer = status(f"{url}/v1/completions", KEY, body)
    return {
        "ready_s": round(time.monotonic() - began_s, 1),
        "completion": code,
        "completion_tokens": (answer or {"usage": {}})["usage"].get("completion_tokens"),
        "without_key": status(f"{url}/v1/models", None)[0],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--record", type=Path, help="file for what was seen, as JSON")
    parser.add_argument(
        "--port",
        type=int,
        default=23300,
        help="first of five free ports, from 20000: Ray takes those below",
    )
    args = parser.parse_args(arguments)
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    with tempfile.TemporaryDirectory(prefix="cs-", ignore_cleanup_errors=True) as scratch:
        machine = Machine(Path(scratch), args.port)
        try:
            set_up(machine, cluster)
            seen = start(machine, cluster)
        except (subprocess.CalledProcessError, SystemExit):
            machine.show_logs()
            raise
        finally:
            machine.stop()
        results = {
            "steps": [asdict(each) for each in machine.steps],
            "sudo": machine.recorded(),
            "serving": seen,
        }
    if args.record is None:
        print(json.dumps(results, indent=1))
    else:
        record.write(args.record, __file__, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
