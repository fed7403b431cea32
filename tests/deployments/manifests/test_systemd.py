"""The unit of systemd: verified by systemd where it is installed, and held against the settings."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.deployments.cli.main import build_parser
from penstock.deployments.config import config_from
from penstock.deployments.config_file import read_config

FOLDER = Path(__file__).parents[3] / "deployments" / "manifests" / "systemd"
UNIT = FOLDER / "penstock.service"


def directives():
    """section -> directive -> its values. Raises ValueError for a line that is neither."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.isalpha():
            raise ValueError(f"no directive: {line}")
        section.setdefault(name, []).append(value)
    return sections


def verify(folder, text):
    """What systemd-analyze says of `text` as a unit file."""
    program = folder / "penstock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", str(program)))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return answer.stdout + answer.stderr


def needs_systemd():
    if shutil.which("systemd-analyze") is None:
        if os.environ.get("CI"):
            pytest.fail("no systemd-analyze: apt-get install systemd")
        pytest.skip("systemd is not installed here")


def test_systemd_takes_it_as_it_is(tmp_path):
    needs_systemd()
    assert verify(tmp_path, UNIT.read_text()) == ""


def test_systemd_would_find_a_wrong_line(tmp_path):
    needs_systemd()
    text = UNIT.read_text().replace("KillMode=mixed", "KillMode=all\nKillTime=5")
    said = verify(tmp_path, text)
    assert "kill mode" in said
    assert "KillTime" in said


def test_it_is_stopped_as_penstock_stops():
    service = directives()["Service"]
    config = config_from(read_config(str(FOLDER / "penstock.yaml")))
    assert service["KillMode"] == ["mixed"]
    assert service["KillSignal"] == ["SIGTERM"]
    assert int(service["TimeoutStopSec"][0]) == config.drain_s + 30
    assert int(service["LimitNOFILE"][0]) >= 65536


def test_it_starts_penstock_with_settings_that_exist():
    (command,) = directives()["Service"]["ExecStart"]
    program, *arguments = shlex.split(command)
    assert Path(program).name == "penstock"
    flags = build_parser().parse_args(arguments)
    assert flags.config == "/etc/penstock/penstock.yaml"
    config = config_from(read_config(str(FOLDER / "penstock.yaml")))
    assert not config.is_open
    assert config.predictor_file is not None
    (state,) = directives()["Service"]["StateDirectory"]
    assert config.predictor_file.startswith(f"/var/lib/{state}/")


def test_it_runs_without_rights_of_the_machine():
    service = directives()["Service"]
    assert service["User"] == ["penstock"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["CapabilityBoundingSet"] == [""]
    assert service["ProtectSystem"] == ["strict"]
    # Python's and torch's compilers write code; the devices of GPUs must be reachable.
    assert {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateIPC"}.isdisjoint(service)
