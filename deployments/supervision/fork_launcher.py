"""What the raylet runs in place of a worker process: asks the fork server for one, and ends.

    python -I -S fork_launcher.py ADDRESS[,ADDRESS] WAIT_S SETUP_WORKER WORKER ARGUMENT...

Each ADDRESS is a socket of the fork server (fork_server.py). They are asked in turn, until one
makes the process; their answers are waited for WAIT_S seconds. The rest is Ray's own command for a
worker process: WORKER with ARGUMENT..., before which SETUP_WORKER makes the environment that an
argument describes. Where the fork server makes no process, this one runs what Ray would have run.
It imports the standard library alone, since it delays each start.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

ENVIRONMENT = "--serialized-runtime-env-context="  # read by SETUP_WORKER, as is the next one
LANGUAGE = "--language="
LEAST_WAIT_S = 0.1


def environment_of(command: Sequence[str]) -> dict[str, Any]:
    """The environment that Ray's command is to make: a RuntimeEnvContext; {} for none."""
    for part in command:
        if part.startswith(ENVIRONMENT):
            context: dict[str, Any] = json.loads(part.removeprefix(ENVIRONMENT))
            return context
    return {}


def without_setup(command: Sequence[str]) -> list[str]:
    """Ray's command for a process whose environment is made: WORKER ARGUMENT..."""
    return [each for each in command[1:] if not each.startswith((ENVIRONMENT, LANGUAGE))]


def is_plain(command: Sequence[str], context: Mapping[str, Any]) -> bool:
    """Whether the process is to run this Python, without flags, and differ in variables alone."""
    same = {"env_vars": context.get("env_vars"), "py_executable": sys.executable}
    differs = any(value and value != same.get(name) for name, value in context.items())
    return not differs and not command[1].startswith("-")


def request_for(command: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """The process that the fork server is asked for: as this one is, which the raylet started."""
    with open("/proc/self/oom_score_adj") as file:
        oom_score = file.read().strip()
    return {
        "argv": without_setup(command),
        "env": {**os.environ, **variables},
        "variables": sorted(variables),
        "cwd": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),  # Ray raises it as it starts
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "leads_group": os.getpgrp() == os.getpid(),
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "oom_score": oom_score,
    }


def is_forked(address: str, wait_s: float, request: Mapping[str, Any]) -> bool:
    """Whether the fork server has made the process. If not it will not, as this end is closed."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(wait_s)
        try:
            server.connect("\0" + address)
            socket.send_fds(server, [b"\n"], [0, 1, 2])
            server.sendall(json.dumps(request).encode())
            server.shutdown(socket.SHUT_WR)
            return bool(server.recv(1))
        except OSError:
            return False


def main() -> None:
    addresses, wait_s, *command = sys.argv[1:]
    deadline_s = time.monotonic() + float(wait_s)
    context = environment_of(command)
    variables = context.get("env_vars") or {}
    if is_plain(command, context):
        request = request_for(command, variables)
        for address in addresses.split(","):
            if is_forked(address, max(deadline_s - time.monotonic(), LEAST_WAIT_S), request):
                return
    os.execv(sys.executable, [sys.executable, *(command if context else without_setup(command))])


if __name__ == "__main__":
    main()
