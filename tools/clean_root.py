"""The steps of the image in a clean root: for machines without a container runtime.

    python -m tools.clean_root --record benchmarks/results/clean-root/x86-64.json

Reads the Dockerfile, makes a root with debootstrap for each stage, executes RUN and COPY there as
they stand (dockerfile.py), starts the command as the image's user (with flags for its ports), sends
requests, ends it, and writes down what was seen. Must run as root; needs debootstrap, some 10 GB
and the package indices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import record
from tools.dockerfile import Build, Stage, chrooted

KEY = "of-the-clean-root"
READY_S, STOP_S = 900.0, 120.0


def processes_in(root: Path) -> list[int]:
    """Processes whose root folder it is."""
    found = []
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit() and os.readlink(each / "root") == str(root):
                found.append(int(each.name))
    return found


@contextlib.contextmanager
def served(stage: Stage, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The image's command as its user; whatever it leaves is killed at the end."""
    keys = stage.root / "etc" / "penstock" / "api-keys"
    keys.parent.mkdir(parents=True)
    keys.write_text(KEY + "\n")
    os.chown(keys, *map(int, stage.user.split(":")))
    keys.chmod(0o400)
    ports = ["--http-port", str(port), "--grpc-port", str(port + 1), "--metrics-port", "0"]
    command = "exec " + shlex.join([*stage.command, *ports])
    process = subprocess.Popen(chrooted(stage, command, {}, stage.user))
    try:
        yield process
    finally:
        for pid in processes_in(stage.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def status(url: str, key: str | None = KEY, body: Any = None) -> tuple[int, Any]:
    """The status of an answer, and its JSON; 0 where nothing answers."""
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as got:
            return got.status, json.loads(got.read())
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def watch(stage: Stage, port: int) -> dict[str, Any]:
    """Start the command, send requests, end it: what was seen."""
    url, began_s = f"http://127.0.0.1:{port}", time.monotonic()
    with served(stage, port) as process:
        while status(f"{url}/ready")[0] != 200:
            if process.poll() is not None or time.monotonic() - began_s > READY_S:
                raise SystemExit(f"not ready; exit status {process.poll()}")
            time.sleep(0.2)
        ready_s = time.monotonic() - began_s
        chat = {"model": "builtin", "messages": [{"role": "user", "content": "Hello"}]}
        code, answer = status(f"{url}/v1/chat/completions", body=chat | {"max_tokens": 16})
        seen: dict[str, Any] = {
            "user": stage.user,
            "ready_s": round(ready_s, 1),
            "chat": code,
            "completion_tokens": (answer or {"usage": {}})["usage"].get("completion_tokens"),
            "without_key": status(f"{url}/v1/models", None)[0],
            "live": status(f"{url}/live", None)[0],
        }
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        seen["exit_status"] = process.wait(STOP_S)
        seen["stop_s"] = round(time.monotonic() - began_s, 1)
        time.sleep(1.0)
        seen["processes_left"] = len(processes_in(stage.root))
    return seen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--record", type=Path, help="file for what was seen, as JSON")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--torch-wheel", type=Path, help="where torch's index cannot be reached")
    parser.add_argument("--port", type=int, default=23200, help="for HTTP; the next one for gRPC")
    args = parser.parse_args(arguments)
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("clean_root: run it as root, with debootstrap installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="clean-root-") as work:
        build = Build(Path(work), args.mirror, args.torch_wheel)
        stage = build.run()
        size = subprocess.run(["du", "-sxk", str(stage.root)], capture_output=True, text=True)
        seen = watch(stage, args.port)
    results = {
        "torch": "from its index" if args.torch_wheel is None else "from a file",
        "steps": [asdict(each) for each in build.steps],
        "root_mib": int(size.stdout.split()[0]) // 1024,
        "command": seen,
    }
    if args.record is None:
        print(json.dumps(results, indent=1))
    else:
        record.write(args.record, __file__, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
