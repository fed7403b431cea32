"""requirements.lock: the versions of constraints.txt with digests, for all that Penstock needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RENEW = "run `make lock`"
# From an index of its own, before the rest.
APART = {"torch"}


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\\n]+)", path.read_text(), flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


LOCKED = pins(ROOT / "requirements.lock")


def test_every_locked_version_is_the_one_that_the_tests_run():
    tested = pins(ROOT / "constraints.txt")
    other = {n: v for n, v in LOCKED.items() if n in tested and tested[n] != v}
    assert not other, RENEW
    assert len(LOCKED.keys() & tested.keys()) > 80


def test_every_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(each) for each in project["dependencies"]]
    wanted = [each for each in needed if each.marker is None or each.marker.evaluate()]
    missing = {canonicalize_name(each.name) for each in wanted} - LOCKED.keys() - APART
    assert not missing, RENEW
    wrong = [
        each.name
        for each in wanted
        if (version := LOCKED.get(canonicalize_name(each.name))) and version not in each.specifier
    ]
    assert not wrong, RENEW


def test_every_locked_package_has_digests():
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text())
    for entry in entries:
        if "==" in entry:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.partition("\n")[0]
