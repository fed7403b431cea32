"""CPU cores that only an engine uses: parsing their list, and pinning threads to them. Linux.

The ranks of a group are pinned, too, where the machine has several NUMA nodes (sockets): each then
computes next to its memory, which the kernel takes from the node of the thread that first writes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")  # of Linux
_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_cores(text: str) -> frozenset[int]:
    """Cores by number, as taskset has them: "3", or "2-7,9". Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"cores are written as 3 or 2-7,9; got {text!r}")
        cores |= set(range(int(first), int(last) + 1))
    return frozenset(cores)


def allowed_cores() -> frozenset[int]:
    """Cores that this thread may run on. Raises OSError where the system has no CPU affinity."""
    if not hasattr(os, "sched_getaffinity"):
        raise OSError("this system cannot keep a thread on a core; Linux can")
    return frozenset(os.sched_getaffinity(0))


def keep_to(cores: Collection[int]) -> None:
    """Pin this thread, and threads that it starts from now on, to these cores."""
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def kept_to(cores: Collection[int] | None) -> Iterator[None]:
    """`keep_to` within a context; None: on all allowed cores."""
    if cores is None:
        yield
        return
    before = allowed_cores()
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(before)


def numa_nodes(cores: Collection[int], root: Path = NODES) -> list[frozenset[int]]:
    """Those of `cores` that each NUMA node has, without nodes that have none; all `cores` as one
    where the system does not say."""
    found = []
    for path in sorted(root.glob("node[0-9]*/cpulist"), key=_number):
        text = path.read_text().strip()  # empty: a node with memory alone
        found.append(frozenset(cores) & (parse_cores(text) if text else frozenset()))
    return [each for each in found if each] or [frozenset(cores)]


def cores_of_rank(
    place: int, num_here: int, num_threads: int, nodes: Sequence[frozenset[int]]
) -> frozenset[int] | None:
    """The cores of the rank at `place` among the `num_here` ranks of this machine: those of one of
    the NUMA `nodes`, which ranks beside each other share, or of several, if there are more nodes
    than ranks. None: all ranks share all cores.

    So it is on a machine of one node, and where the ranks of a node have more threads
    (`num_threads` each) than the node has cores.
    """
    if len(nodes) == 1 or num_here == 1:
        return None
    spans = [_nodes_of(each, num_here, len(nodes)) for each in range(num_here)]
    for first, end in spans:
        if sum(map(len, nodes[first:end])) < spans.count((first, end)) * num_threads:
            return None
    first, end = spans[place]
    return frozenset().union(*nodes[first:end])


def _nodes_of(place: int, num_ranks: int, num_nodes: int) -> tuple[int, int]:
    first = place * num_nodes // num_ranks
    return first, max(first + 1, (place + 1) * num_nodes // num_ranks)


def _number(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))
