"""What guards the doors holds under `python -O`, too, which leaves out all `assert` statements.

The chosen tests run in a process of their own. pytest makes `if` statements of the asserts in test
files, so they check under -O as well; that of a file that must fail shows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPLOYMENTS = "tests/deployments"
CHOSEN = (
    f"{DEPLOYMENTS}/test_config.py",  # keys and names that make a server open or not
    f"{DEPLOYMENTS}/ingress/http/listener/test_hosts.py",
    f"{DEPLOYMENTS}/ingress/http/listener/test_protocol.py::"
    "test_what_is_too_large_or_wrong_is_refused_and_the_connection_closed",
    f"{DEPLOYMENTS}/ingress/http/test_body.py::test_the_last_of_many_is_still_looked_at",
    f"{DEPLOYMENTS}/ingress/test_prompt_scores.py::test_http_refuses_a_call_with_too_many_scores",
    f"{DEPLOYMENTS}/ingress/security/test_tenants.py::test_domains_differ_by_principal_and_salt_and_so_do_marks",
    f"{DEPLOYMENTS}/ingress/dispatch/test_pool.py::test_strangers_and_other_epochs_are_refused",
    f"{DEPLOYMENTS}/ingress/core/test_service.py::test_what_cannot_be_served_is_refused_by_name",
    f"{DEPLOYMENTS}/ingress/core/test_service.py::test_cancel_wants_the_exact_id_and_the_same_principal",
    "tests/workers/channel/test_numbers.py",
    "tests/workers/channel/test_framing.py",
    "tests/workers/weights/test_fuzz.py::test_deep_and_long_headers",
    "tests/workers/weights/test_fuzz.py::test_any_damage",
    "tests/workers/sampling/test_logits.py::test_out_of_range_is_named",
)


def pytest_under_o(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-O", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_asserts_in_test_files_check_under_o(tmp_path):
    """Else the next test could not fail."""
    (tmp_path / "test_it.py").write_text(
        "import module\n\n"
        "def test_right():\n    assert not __debug__\n    assert module.unchecked() == 1\n\n"
        "def test_wrong():\n    assert 1 + 1 == 3\n"
    )
    (tmp_path / "module.py").write_text("def unchecked():\n    assert False\n    return 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    done = pytest_under_o(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout


def test_the_guards_hold_under_o():
    done = pytest_under_o(ROOT, *CHOSEN)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed > 100
