"""The folders at the top are the sub-packages of `penstock`, for every tool that reads the tree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[1]
ROOMS = ("deployments", "kernels", "protos", "workers")


def test_src_holds_one_link_for_each_package_and_the_public_names():
    found = {each.name for each in (ROOT / "src" / "penstock").iterdir()} - {"__pycache__"}
    assert found == {*ROOMS, "__init__.py", "ray_data.py", "py.typed"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_link_is_relative_and_leads_to_its_folder(room):
    link = ROOT / "src" / "penstock" / room
    assert link.readlink() == Path("..", "..", room)
    assert link.resolve() == (ROOT / room).resolve()
    assert (ROOT / room / "py.typed").exists()


def test_manifests_are_data_of_the_repository_and_no_package():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = find_namespace_packages(
        str(ROOT / "src"), find["find"]["exclude"], find["find"]["include"]
    )
    assert {"penstock", "penstock.deployments.ingress.http"} <= set(found)
    assert not [name for name in found if "manifests" in name]
    assert not list((ROOT / "deployments" / "manifests").rglob("*.py"))


def test_no_file_has_the_marks_of_a_merge_conflict():
    """ruff and mypy do not see them inside a string, such as a help text."""
    marks = re.compile(rb"^(<{7}|>{7}) ", re.M)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert not [path for path in paths if path.is_file() and marks.search(path.read_bytes())]


def test_no_folder_has_more_than_18_files_of_code():
    """Beside `__init__.py`: a reader sees at a glance what is in it."""
    counts: Counter[Path] = Counter()
    for top in (*ROOMS, "benchmarks", "tests", "tools"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp") and path.name != "__init__.py":
                counts[path.parent] += 1
    assert len(counts) > 100
    assert {str(each): num for each, num in counts.items() if num > 18} == {}
