"""The certificates of the cluster's own processes: their roles, their CA, their replacement."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from penstock.deployments.app import _warn_of_clear_links
from penstock.deployments.config import ServeConfig
from penstock.deployments.placement import ClusterResources, Node
from penstock.deployments.preflight import check_before_start
from penstock.deployments.security.authority import make_all, renew_all
from penstock.deployments.security.cluster_links import ClusterCertificate, der_of
from penstock.deployments.security.identity import WrongPeer
from penstock.workers.errors import ConfigError
from tests.deployments.ports import free_port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_all(tmp_path / "certs", "test", days=20)
    return tmp_path / "certs"


def test_a_certificate_in_the_place_of_another_role_is_refused(folder: Path) -> None:
    for ending in ("crt", "key"):
        shutil.copy(folder / f"worker.{ending}", folder / f"ingress.{ending}")
    with pytest.raises(ConfigError, match=r"ingress.crt: it is of the role worker, and must be"):
        ClusterCertificate(str(folder), "ingress")


def test_a_replacement_of_another_role_or_cluster_is_left_alone(
    folder: Path, tmp_path: Path
) -> None:
    worker = ClusterCertificate(str(folder), "worker", reload_s=0.0)
    before = der_of(worker.newest())
    make_all(tmp_path / "other", "other", days=20)
    wrong = ((folder / "gate", folder), (tmp_path / "other" / "worker", tmp_path / "other"))
    for source, of_ca in wrong:
        for ending in ("crt", "key"):
            shutil.copy(source.with_suffix(f".{ending}"), folder / f"worker.{ending}")
        if of_ca != folder:
            shutil.copy(of_ca / "ca.crt", folder)
        assert [der_of(worker.newest()) for _ in range(2)] == [before, before]
        assert worker.certificates.reload_failed


def test_what_lacks_is_named_before_anything_starts(folder: Path) -> None:
    (folder / "gate.key").unlink()
    config = ServeConfig(
        cluster_certs_dir=str(folder), http_port=free_port(), grpc_port=free_port()
    )
    with pytest.raises(ConfigError, match=r"cluster_certs_dir .*gate.key cannot be read"):
        check_before_start(config)


def test_a_told_certificate_must_be_of_the_role_and_of_the_ca(folder: Path, tmp_path: Path) -> None:
    ingress = ClusterCertificate(str(folder), "ingress")
    gate = der_of(ClusterCertificate(str(folder), "gate").newest())
    assert ingress.check_told(gate, "gate") == "gate of test"
    with pytest.raises(WrongPeer, match="it is a gate, not a worker"):
        ingress.check_told(gate, "worker")
    make_all(tmp_path / "other", "test", days=20)  # a CA of the same name
    other = der_of(ClusterCertificate(str(tmp_path / "other"), "gate").newest())
    with pytest.raises(WrongPeer, match="no CA in cluster_certs_dir has signed"):
        ingress.check_told(other, "gate")
    with pytest.raises(WrongPeer):
        ingress.check_told(gate[:-1], "gate")


def test_new_files_are_taken_for_the_next_connection(folder: Path) -> None:
    worker = ClusterCertificate(str(folder), "worker", reload_s=0.0)
    before = worker.server_end("ingress")
    renew_all(folder, days=20)
    after = worker.server_end("ingress")
    assert before.certificate != after.certificate and before.context is not after.context
    (folder / "worker.crt").write_text("half a fi")
    assert worker.server_end("ingress").certificate == after.certificate


@pytest.mark.parametrize(("num_nodes", "has_certs"), [(1, False), (2, False), (2, True)])
def test_several_machines_without_certificates_are_warned_of(
    caplog: pytest.LogCaptureFixture, num_nodes: int, has_certs: bool
) -> None:
    config = ServeConfig(cluster_certs_dir="certs" if has_certs else None)
    with caplog.at_level(logging.WARNING):
        _warn_of_clear_links(config, ClusterResources((Node(),) * num_nodes))
    warned = [each for each in caplog.records if "in the clear" in each.message]
    assert len(warned) == (num_nodes == 2 and not has_certs)
