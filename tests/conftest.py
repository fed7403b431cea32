"""Shared by all tests: nothing from outside the machine, and one thread unless a test asks."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Two spinning OpenMP threads a process slow the whole machine as soon as another process runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray reads these once, when it is first imported. Its ports are open on every interface: a token
# keeps others out. Replicas run at nice 15 by default.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

# Tests run in two processes, a file in one of them. Those that start Ray take turns: two clusters
# that start at once on two cores miss their own deadlines. They are long, so they begin.
RAY_FILES = {
    ROOT / "deployments" / each
    for each in (
        "test_cluster.py",
        "cli/test_main.py",
        "gate/test_server.py",
        "experts/test_store.py",
    )
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path not in RAY_FILES)
    for item in items:
        group = "ray" if item.path in RAY_FILES else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
