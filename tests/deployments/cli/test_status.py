"""`penstock status`: the tables, from what a server answers."""

from __future__ import annotations

import time

from penstock.deployments.cli import main as cli
from penstock.deployments.cli.status import status_text
from penstock.deployments.security.roles import Role
from penstock.workers.stats import EngineStats
from tests.deployments.ingress.http.test_console import WARNINGS, ClusterBackend, worker
from tests.deployments.security.keys import key_of
from tests.deployments.serving import Serving


def test_nodes_workers_and_decisions_of_a_live_server(capsys, tmp_path):
    backend = ClusterBackend([5])
    stats = EngineStats(num_running=3, num_waiting=1, num_blocks=200, num_live_blocks=50)
    backend.alive = (worker(1, stats, node="b", is_draining=True), worker(2, stats, node="b"))
    backend.warnings = WARNINGS
    with Serving(backend, data_dir=tmp_path) as servers:
        assert cli.main(["status", "--url", servers.base_url]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "node             CPUs  GPUs  workers  ingresses" in lines
    assert "head0000 (head)  0     0     0        0" in lines
    assert "b                8     1     2        1" in lines
    assert "00000001  b     draining  3        1        25 %     0" in lines
    assert "00000002  b     serves    3        1        25 %     0" in lines
    assert "Worker: 3 wanted of 1:8, 2 ready; 2 to 3: work waits" in lines
    assert any(line.startswith("  5 min ago: Worker up: 1 to 2") for line in lines)
    assert "2 replicas could not start: see Ray's logs" in lines
    assert "4 requests wait at the gate: penstock queue says why" in lines
    assert "WARNING: the store is away" in lines
    assert "WARNING: the keys are bad (ingress beefcafe)" in lines


def test_a_killed_worker_is_listed_as_lost_beside_the_one_that_replaces_it(capsys, tmp_path):
    class WithOneKilled(ClusterBackend):
        def has_lost(self, epoch):
            return epoch == self.alive[0][0].epoch

    backend = WithOneKilled([5])
    killed, new = worker(1, EngineStats(), node="b"), worker(2, EngineStats(), node="b")
    backend.alive = (killed, new)  # the registry lists it until its reports are missed
    with Serving(backend, data_dir=tmp_path) as servers:
        assert cli.main(["status", "--url", servers.base_url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["00000001", "b", "lost"] in [line[:3] for line in lines]
    assert ["00000002", "b", "serves"] in [line[:3] for line in lines]
    assert ["b", "8", "1", "1", "1"] in lines, "the node has one worker"


def test_of_several_models_each_worker_says_which_it_has(capsys, tmp_path):
    backend = ClusterBackend([5])
    first, stats = worker(1, EngineStats(), node="b")
    backend.alive = ((first, stats), worker(2, EngineStats(), node="b", model="other"))
    with Serving(backend, data_dir=tmp_path) as servers:
        assert cli.main(["status", "--url", servers.base_url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["00000001", first.model, "b", "serves"] in [line[:4] for line in lines]
    assert ["00000002", "other", "b", "serves"] in [line[:4] for line in lines]


def test_a_key_for_metrics_alone_sees_the_cluster_and_no_batches(capsys, tmp_path):
    key, record = key_of("board", [Role.METRICS])
    file = tmp_path / "key"
    file.write_text(key)
    with Serving(ClusterBackend([5]), data_dir=tmp_path, api_keys=[record]) as servers:
        url = servers.base_url
        assert cli.main(["status", "--url", url, "--api-key-file", str(file)]) == 0
        assert "head0000 (head)" in capsys.readouterr().out
        assert cli.main(["queue", "--url", url, "--api-key-file", str(file)]) == 1
        assert "needs a key with the role queue" in capsys.readouterr().err


def test_batches_have_their_progress():
    status = {
        "version": "1", "is_ready": False, "models": [{"id": "m"}], "workers": [], "nodes": [],
        "ingresses": [], "scaling": [], "scale_changes": [], "num_failed_starts": 0,
        "jobs": [],
    }  # fmt: skip
    runs = {
        "id": "batch_1", "status": "in_progress", "expires_at": time.time() + 7200.5,
        "request_counts": {"total": 10, "completed": 4, "failed": 1}, "waits_for": None,
        "errors": None,
    }  # fmt: skip
    problems = [{"line": 3, "message": "url is wrong"}, {"line": 9, "message": "no JSON"}]
    none = {"total": 0, "completed": 0, "failed": 0}
    failed = {**runs, "status": "failed", "request_counts": none, "errors": {"data": problems}}
    lost = {**runs, "waits_for": "worker_lost"}
    text = status_text(status, [runs, failed, lost])
    assert "not ready: no worker takes requests" in text
    assert "batch_1  in_progress  4         1       10        50 %, expires in 2.0 h\n" in text
    assert "batch_1  failed       0         0       0         line 3: url is wrong (and ot" in text
    assert text.endswith("expires in 2.0 h, sent again: worker_lost")


def test_an_address_of_grpc_is_refused(capsys):
    assert cli.main(["status", "--url", "grpc://127.0.0.1:1"]) == 2
    assert "give --url http://host:port" in capsys.readouterr().err
