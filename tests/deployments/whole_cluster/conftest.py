"""The cluster that the files of this folder share; its end must leave nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.processes import is_running
from tests.deployments.clusters import ENGINE, pids_of, running
from tests.deployments.ports import free_port


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    state = tmp_path_factory.mktemp("state")
    state.chmod(0o700)
    return ServeConfig(
        engine=ENGINE,
        state_url=f"sqlite://{state}",
        http_port=free_port(),
        grpc_port=free_port(),
        num_workers=2,
        app_name="penstock-test",
        drain_s=5.0,
        metrics_port=free_port(),
        unknown_fields="refuse",  # as the hostile corpus expects
    )


@pytest.fixture(scope="package")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with running(config) as cluster:
        yield cluster
        pids = pids_of(cluster.view())
    left = [pid for pid in pids if is_running(pid)]
    assert not left, f"processes outlived the cluster: {left}"
    assert is_free(config.http_port)
    assert is_free(config.grpc_port)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
