"""The folders at the top are the sub-packages of `penstock`, for every tool that reads the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("deployments", "kernels", "protos", "workers")


def test_src_holds_one_link_for_each_package():
    assert sorted(each.name for each in (ROOT / "src" / "penstock").iterdir()) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_link_is_relative_and_leads_to_its_folder(room):
    link = ROOT / "src" / "penstock" / room
    assert link.readlink() == Path("..", "..", room)
    assert link.resolve() == (ROOT / room).resolve()
    assert (ROOT / room / "py.typed").exists()
