"""Ranks on a machine with several NUMA nodes: which cores each computes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.workers.cpu_affinity import cores_of_rank, numa_nodes
from tests.workers.checkpoints import make_checkpoint

TWO = [frozenset(range(8)), frozenset(range(8, 16))]
FOUR = [frozenset(range(first, first + 4)) for first in (0, 4, 8, 12)]


def node_files(folder: Path, *cores: str) -> Path:
    for number, text in enumerate(cores):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(text + "\n")
    return folder


def test_nodes_of_the_system(tmp_path):
    root = node_files(tmp_path, "0-1,8-9", "2-3", "", *[""] * 7, "4")  # the third has no cores
    assert numa_nodes({0, 1, 2, 3, 4, 8}, root) == [{0, 1, 8}, {2, 3}, {4}]
    assert numa_nodes({2, 3}, root) == [{2, 3}]  # no other core is allowed
    assert numa_nodes({0, 5}, tmp_path / "none") == [{0, 5}]


@pytest.mark.parametrize(
    ("num_here", "threads", "nodes", "cores"),
    [
        (2, 8, TWO, TWO),
        (4, 4, TWO, [TWO[0], TWO[0], TWO[1], TWO[1]]),
        (3, 4, TWO, [TWO[0], TWO[0], TWO[1]]),
        (2, 8, FOUR, [TWO[0], TWO[1]]),
        (3, 4, FOUR, [FOUR[0], FOUR[1], FOUR[2] | FOUR[3]]),
        (2, 9, TWO, [None, None]),  # more threads than cores of a node
        (3, 8, TWO, [None, None, None]),
        (2, 1, [frozenset(range(16))], [None, None]),
        (1, 16, TWO, [None]),
    ],
)
def test_cores_of_each_rank(num_here, threads, nodes, cores):
    assert [cores_of_rank(each, num_here, threads, nodes) for each in range(num_here)] == cores


PINNED = """
import json, os, sys, psutil
from penstock.workers.engine.load import thread_for
from tests.workers.engine.group.test_group import engine_of, run
engine = engine_of(sys.argv[1], 2)
(child,) = psutil.Process().children()
thread = thread_for(engine, lambda deltas: None, lambda: None)
cores = {task.id: os.sched_getaffinity(task.id) for task in child.threads()}
found = {
    "leader": engine.config.compute_cores,
    "rank": sorted(set().union(*cores.values())),
    "here": sorted(os.sched_getaffinity(0)),
    "ids": run(engine),
}
thread.stop()
print(json.dumps(found))
"""


def test_ranks_of_two_nodes(tmp_path):
    """This machine's first two cores as two nodes, which the kernel shows to this process alone."""
    root = node_files(tmp_path, "0", "1")
    see = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount --bind {root} /sys/devices/system/node"
    if subprocess.run([*see, mount], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    command = [sys.executable, "-c", PINNED, str(make_checkpoint("llama"))]
    there = [*see, f'{mount} && exec "$@"', "sh", *command]
    of_nodes, plain = (
        json.loads(
            subprocess.run(
                each, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True,
                timeout=200,
            ).stdout.splitlines()[-1]
        )
        for each in (there, command)
    )  # fmt: skip
    assert (of_nodes["leader"], of_nodes["rank"]) == ("0", [1])
    assert plain["leader"] is None and len(plain["rank"]) > 1
    assert of_nodes["here"] == plain["here"] and of_nodes["ids"] == plain["ids"]
