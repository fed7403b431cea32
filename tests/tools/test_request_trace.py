"""The list of functions that a request passes names functions that exist."""

from __future__ import annotations

from tools.request_trace import Hop, hops, num_changes


def test_every_function_of_the_trace_exists():
    assert [(hop.path, hop.name) for hop in hops() if not hop.num_lines] == []
    assert len(hops()) > 150


def test_changes_of_file_are_counted_between_neighbours():
    paths = ("a.py", "a.py", "b.py", "a.py")
    assert num_changes([Hop(1, path, "f", 1) for path in paths]) == 2
