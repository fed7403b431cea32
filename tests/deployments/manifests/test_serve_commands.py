"""`penstock serve --ray-address auto` and `serve run` on one Ray cluster: the same deployments."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import state

from tests.deployments.manifests.local_nodes import APART, LocalNodes, alive, fetch, local_nodes
from tests.deployments.manifests.local_nodes import send as request
from tests.deployments.ports import free_port
from tests.deployments.waiting import eventually

APP = "penstock.deployments.app:build_app"
START_S = 240
END_S = 120


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    """A head with two CPUs, and Serve without its proxy, whose port is Penstock's default."""
    folder = tempfile.TemporaryDirectory(prefix="pr-", ignore_cleanup_errors=True)
    with folder as home, local_nodes(Path(home)) as nodes:
        nodes.begin(
            f"ray start --head --port={nodes.ports.gcs} --num-cpus=2 --include-dashboard=false "
            f"--temp-dir={nodes.home / 'r'} {shlex.join(APART)}"
        )
        address = f"127.0.0.1:{nodes.ports.gcs}"
        eventually(lambda: _has_head(nodes, address), START_S, "the head")
        nodes.run(f"RAY_ADDRESS={address} serve start --proxy-location Disabled")
        yield nodes


def _has_head(nodes: LocalNodes, address: str) -> bool:
    if not ray.is_initialized():
        with contextlib.suppress(ConnectionError):
            nodes.connect()
    return ray.is_initialized() and len(alive()) == 1


@contextlib.contextmanager
def started(nodes: LocalNodes, command: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in the foreground, as in a terminal; its output is in home/output."""
    with open(nodes.home / "output", "w") as output:
        process = subprocess.Popen(
            shlex.split(command),
            env=nodes.environment | {"RAY_ADDRESS": f"127.0.0.1:{nodes.ports.gcs}"},
            cwd=nodes.home,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            # A shell starts what runs in its background, and so these tests, with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def output(nodes: LocalNodes) -> str:
    return (nodes.home / "output").read_text()


def replicas() -> dict[str, int]:
    """Living replicas, by deployment."""
    names = [
        actor["Name"].split("#")[-2]
        for actor in state.actor_table(None).values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith("SERVE_REPLICA")
    ]
    return {name: names.count(name) for name in names}


def served_and_ended(
    nodes: LocalNodes, command: str, http_port: int, says: str = ""
) -> tuple[dict[str, int], str]:
    """Replicas that the command brings up, and the text of an answer of them; then it is ended.

    `says`: what the command prints once all replicas serve; before, it ends with status 130.
    """
    url = f"http://127.0.0.1:{http_port}"
    with started(nodes, command) as process:

        def is_ready() -> bool:
            assert process.poll() is None, output(nodes)
            return (
                says in output(nodes)
                and replicas() == {"Worker": 2, "Ingress": 1}
                and fetch(f"{url}/ready") == 200
            )

        eventually(is_ready, START_S, command)
        body = {"model": "builtin", "prompt": "The sea was", "max_tokens": 8, "temperature": 0}
        answer = request(f"{url}/v1/completions", None, body)
        assert answer["usage"]["completion_tokens"] == 8
        seen = replicas()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(END_S) == 0, output(nodes)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {output(nodes)}")
    assert "Traceback" not in output(nodes)
    eventually(lambda: replicas() == {}, END_S, "the end of the replicas")
    assert fetch(f"{url}/live") == 0
    return seen, answer["choices"][0]["text"]


@pytest.mark.timeout(900)
def test_both_commands_bring_up_the_same_and_end_cleanly(nodes: LocalNodes) -> None:
    settings: dict[str, Any] = {
        "num_workers": 2,
        "cpus_per_worker": 0.5,
        "weights": "fp32",
        "metrics_port": 0,
    }

    def ports() -> dict[str, int]:
        return {"http_port": free_port(), "grpc_port": free_port()}

    flags = settings | ports()
    by_penstock = served_and_ended(
        nodes,
        "penstock serve --ray-address auto "
        + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items()),
        flags["http_port"],
        "Ctrl-C stops",
    )
    said = output(nodes)
    assert "connecting to Ray at auto" in said and said.rstrip().endswith("stopped")
    assert len(alive()) == 1  # the cluster is the operator's: only the application has gone
    flags = settings | ports()
    by_serve_run = served_and_ended(
        nodes,
        f"serve run {APP} " + " ".join(f"{name}={value}" for name, value in flags.items()),
        flags["http_port"],
    )
    assert by_penstock == by_serve_run
    assert by_penstock[0] == {"Worker": 2, "Ingress": 1}
