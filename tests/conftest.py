"""Shared by all tests: nothing from outside the machine, and one thread unless a test asks."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# What servers learn goes here, and not into the home of who runs the tests. Ray's processes inherit
# it. `own_state_folder` gives each file of tests a folder of its own.
STATE_FOLDER = Path(tempfile.mkdtemp(prefix="penstock-tests-state-"))
os.environ["XDG_STATE_HOME"] = str(STATE_FOLDER)

# One authority in place of the system's 120 and more, which each HTTP client reads when it is made:
# that takes 50 ms of CPU, and tests make thousands. None calls a host that these vouch for.
AUTHORITY = STATE_FOLDER / "authority.pem"
AUTHORITY.write_text(
    "".join(Path(certifi.where()).read_text().partition("END CERTIFICATE-----")[:2])
)
os.environ["SSL_CERT_FILE"] = str(AUTHORITY)

# Two spinning OpenMP threads a process slow the whole machine as soon as another process runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run: what the gate says depends on the change alone. `make fuzz` draws
# new ones. The default deadline of 200 ms an example fails tests that write files where the machine
# is busy.
hypothesis.settings.register_profile("gate", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gate")

# Ray reads these once, when it is first imported. Its ports are open on every interface: a token
# keeps others out. Replicas run at nice 15 by default.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
# Seconds in which a node has to start; the default of 30 is short where others use the machine.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

# Tests run in three processes, a file in one of them. Those that start Ray take turns: two clusters
# that start at once on two cores miss their own deadlines. They are long, so they begin, and the
# others give way to them: they wait for much of their time, and would else make them longer still.
RAY_FILES = {
    ROOT / "deployments" / each
    for each in (
        "batch/test_ray_job.py",
        "whole_cluster/test_cluster.py",
        "whole_cluster/test_control_plane.py",
        "test_ray_data.py",
        "test_ray_start.py",
        "adapters/test_adapters_under_load.py",
        "supervision/test_drain_without_registry.py",
        "several_nodes/test_drain.py",
        "several_nodes/test_nodes.py",
        "several_nodes/test_weights_update.py",
        "test_nodes_ingress.py",
        "test_several_models.py",
        "supervision/test_groups.py",
        "supervision/test_stages.py",
        "supervision/test_group_nodes.py",
        "autoscale/test_scaling.py",
        "autoscale/test_to_zero.py",
        "cli/test_main.py",
        "gate/test_server.py",
        "experts/test_store.py",
        "experts/test_far_store.py",
        "experts/test_hung_store.py",
        "manifests/test_head_lost.py",
        "manifests/test_serve_commands.py",
        "manifests/test_start_commands.py",
    )
}

# A guard against what hangs, where a test says nothing else: the first one of a file waits for the
# start of its cluster, too.
RAY_TIMEOUT_S = 900

# Tests of processes, connections and deadlines have time limits, which a machine that others use,
# too, may miss. They run once more if they fail; the summary names those that did. Tests of kernels
# and of the engine have none, and run once.
RERUN_FOLDERS = (ROOT / "deployments", ROOT / "benchmarks", ROOT / "clients")


GIVES_WAY = 5
FAULTS = ROOT / "benchmarks" / "faults"  # bounds of how long a client waits: these do not give way
_first_nice: int | None = None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path not in RAY_FILES)
    is_cpu = config.getoption("--device") == "cpu"
    for item in items:
        if not is_cpu and item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason="of what only a model on the CPU shows"))
        if item.path in RAY_FILES and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RAY_TIMEOUT_S))
        if any(folder in item.path.parents for folder in RERUN_FOLDERS):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """It makes millions of objects that stay. To look for garbage among them again and again takes
    a fifth of its time, and more in each test that makes objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# pytest-timeout sets its timer once a test. pytest-rerunfailures runs the test again within that: a
# second run that hangs would hang for ever.
_TIMEOUT = pytest.StashKey[Any]()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_TIMEOUT] = settings


def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "execution_count", 1) > 1 and _TIMEOUT in item.stash:
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[_TIMEOUT])
    _set_priority(item)


def _set_priority(item: pytest.Item) -> None:
    global _first_nice
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    if _first_nice is None:
        _first_nice = os.getpriority(os.PRIO_PROCESS, 0)
    keeps = item.path in RAY_FILES or FAULTS in item.path.parents
    with contextlib.suppress(PermissionError):  # only root may take back what it gave way
        os.setpriority(os.PRIO_PROCESS, 0, _first_nice + (0 if keeps else GIVES_WAY))


class _Progress:
    """Says at once why a test failed or runs once more: else one learns it late, or never."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome in ("rerun", "failed"):
            crash = getattr(report.longrepr, "reprcrash", None)
            print(f"\n{report.outcome}: {report.nodeid}: {crash or report.longrepr}", flush=True)


@pytest.fixture(scope="module", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server of one file of tests begins with nothing of what those of others have learnt."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries that look for leaks at the end would take it all for some
    shutil.rmtree(STATE_FOLDER, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of the models that tests/workers load; cuda: a machine with a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only: of what only a model on the CPU shows")
    if config.getoption("--device") == "cuda":
        _load_on_the_gpu()
    if not hasattr(config, "workerinput"):  # not in xdist's processes, whose reports come here
        config.pluginmanager.register(_Progress())


def _load_on_the_gpu() -> None:
    """Tests that name no device load their models there."""
    from penstock.workers.models.loader import load_model

    defaults = load_model.__kwdefaults__
    assert defaults is not None and defaults["device"] == "cpu"
    defaults["device"] = "cuda"


class _Groups(LoadFileScheduling):
    """A file in one process, and all files that start Ray in the same one.

    Not by xdist's marker `xdist_group`: pytest 9.2 has no `Item._nodeid`, into which it is written.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "ray" if ROOT.parent / file in RAY_FILES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups | None:
    """For `--dist loadfile`, as `make test` runs."""
    return _Groups(config, log) if config.getvalue("dist") == "loadfile" else None
