"""A cluster stops as it should although its registry stands still: Serve drains the ingresses."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.actors import CALL_TIMEOUT_S
from tests.deployments.clusters import ENGINE, running
from tests.deployments.ports import free_port
from tests.deployments.waiting import eventually

NOTICE_S = 10.0


def drained(cluster: Cluster) -> tuple[threading.Thread, list[float]]:
    """The thread in which it drains, and when that was over."""
    ends: list[float] = []

    def drain() -> None:
        cluster.drain(lambda: False)
        ends.append(time.monotonic())

    thread = threading.Thread(target=drain)
    thread.start()
    return thread, ends


def test_an_ingress_is_not_ready_at_once_and_ends_its_streams():
    config = ServeConfig(
        engine=ENGINE,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        drain_s=200.0,  # in which a busy machine ends the stream
        drain_notice_s=NOTICE_S,
        app_name="penstock-no-registry",
    )
    with running(config) as cluster:
        url = f"http://127.0.0.1:{config.http_port}"
        registry = cluster.view().pid
        body = {"prompt": "The sea was", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            os.kill(registry, signal.SIGSTOP)
            try:
                began_s = time.monotonic()
                draining, ends = drained(cluster)
                # The driver waits for the registry first; then Serve's controller has to look.
                eventually(lambda: http.get("/ready").status_code == 503, CALL_TIMEOUT_S + 5.0)
                assert list(lines)[-2] == "data: [DONE]"
                idle_s = max(time.monotonic(), began_s + NOTICE_S)
                draining.join(220)
                assert ends and ends[0] - idle_s < 60.0  # and does not last for all of drain_s
            finally:
                os.kill(registry, signal.SIGCONT)
