"""A server's own Ray makes no processes ahead; one that misses its time limit is started once more.

Nothing of the first try stays.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.deployments import cluster
from penstock.deployments.cluster import Cluster, StartError
from penstock.deployments.config import ServeConfig

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def starts(monkeypatch):
    """Replaces `ray.init`: leaves a process running each time, and fails `num_failures` times."""
    begun = []

    def of(num_failures, error):
        def init(**_):
            begun.append(subprocess.Popen(SLEEP))
            if len(begun) <= num_failures:
                raise error

        monkeypatch.setattr(cluster.ray, "init", init)
        # Our own children only: the tests may have others.
        monkeypatch.setattr(cluster, "descendants", lambda _: [each.pid for each in begun])
        return begun

    yield of
    for process in begun:
        process.kill()
        process.wait()


def test_one_miss_is_forgiven(starts, caplog):
    begun, made = starts(1, Exception("30 s")), Cluster(ServeConfig())
    made.start_ray()
    made.remove_folder()
    assert len(begun) == 2 and begun[0].wait(30) is not None and begun[1].poll() is None
    assert "trying once more" in caplog.text


def test_two_misses_are_an_error(starts):
    begun, made = starts(2, Exception("30 s")), Cluster(ServeConfig())
    with pytest.raises(StartError, match="Ray did not start in time"):
        made.start_ray()
    made.remove_folder()
    assert len(begun) == 2


def test_an_existing_cluster_is_tried_once(starts):
    begun = starts(1, Exception("30 s"))
    with pytest.raises(StartError, match="Ray did not start in time"):
        Cluster(ServeConfig(ray_address="10.0.0.1:6379")).start_ray()
    assert len(begun) == 1


def test_an_error_that_will_not_go_away_is_raised_at_once(starts):
    begun, made = starts(1, ConnectionError("no")), Cluster(ServeConfig())
    with pytest.raises(StartError, match="Ray did not start: no"):
        made.start_ray()
    made.remove_folder()
    assert len(begun) == 1


ONLY_RAY = """
import psutil
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig

made = Cluster(ServeConfig())
try:
    made.start_ray()
    processes = psutil.Process().children(recursive=True)
    commands = [each.cmdline() for each in processes]
    assert any("raylet" in command[0] for command in commands), commands
    # The raylet's own command names the launcher.
    print([" ".join(command) for command in commands if "raylet" not in command[0]])
finally:
    made.stop()
"""


def test_ray_makes_no_process_before_one_is_asked_for():
    """Its `init` would wait for them, and the driver could import nothing meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", ONLY_RAY], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "gcs_server" in done.stdout
    assert "fork_launcher" not in done.stdout and "ray::" not in done.stdout, done.stdout
