"""`penstock keys`, as an operator uses it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.deployments.cli import main as cli
from penstock.deployments.cli.server import ServerError, connect
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.key_file import read_key_file
from penstock.deployments.security.key_format import parse_key
from penstock.deployments.security.records import QuotaLimits
from penstock.deployments.security.roles import Role
from penstock.workers.request import RequestError
from tests.deployments.security.keys import key_of
from tests.deployments.serving import ScriptedBackend, Serving

Capture = pytest.CaptureFixture[str]


def keys(*arguments: str) -> int:
    return cli.main(["keys", *arguments])


def added(file: Path, capsys: Capture, *arguments: str) -> str:
    """The key that was printed."""
    assert keys("add", "--file", str(file), *arguments) == 0
    return capsys.readouterr().out.strip()


def test_a_key_is_printed_once_and_works(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys"
    text = added(
        file, capsys, "--tenant", "acme", "--role", "infer", "--role", "queue", "--expires", "90d",
        "--requests-per-minute", "60", "--tokens-per-day", "2M", "--weight", "2",
        "--max-priority", "10", "--note", "web shop",
    )  # fmt: skip
    parsed = parse_key(text)
    assert parsed is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content = file.read_text()
    assert text.split("_")[2] not in content and parsed.digest.hex() in content
    (record,) = read_key_file(str(file))
    assert record.roles == {Role.INFER, Role.QUEUE} and record.note == "web shop"
    assert record.terms.quotas == QuotaLimits(requests_per_minute=60, tokens_per_day=2_000_000)
    assert record.terms.weight == 2.0 and record.max_priority == 10
    assert record.expires is not None and 89 < (record.expires - time.time()) / 86400 < 91
    assert ApiKeys([record]).caller(f"Bearer {text}").tenant == "acme"
    assert keys("list", "--file", str(file)) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == [
        *("id", "tenant", "roles", "state", "expires", "quotas", "weight", "priority", "note")
    ]
    for shown in (record.key_id, "acme", "infer,queue", "valid", "60 requests/minute", "web shop"):
        assert shown in row
    assert text not in row and parsed.digest.hex() not in row


def test_rotation_keeps_the_terms_of_the_tenant(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys"
    old = added(file, capsys, "--tenant", "acme", "--requests-per-day", "5k", "--weight", "3")
    new = added(file, capsys, "--tenant", "acme", "--tokens-per-minute", "100")
    third = added(file, capsys, "--tenant", "acme", "--requests-per-day", "none")
    terms = [each.terms for each in read_key_file(str(file))]
    assert terms[1].weight == 3.0
    assert terms[1].quotas == QuotaLimits(requests_per_day=5000, tokens_per_minute=100)
    assert terms[2].quotas == QuotaLimits(tokens_per_minute=100)
    old_id = old.split("_")[1]
    assert keys("revoke", "--file", str(file), old_id) == 0
    accepted = ApiKeys(read_key_file(str(file)))
    assert accepted.caller(f"Bearer {new}").tenant == accepted.caller(f"Bearer {third}").tenant
    with pytest.raises(RequestError, match=f"{old_id} was revoked"):
        accepted.caller(f"Bearer {old}")
    capsys.readouterr()
    keys("list", "--file", str(file))
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]] == [
        *("revoked", "valid", "valid")
    ]


def test_a_bare_key_is_revoked_by_its_id_even_if_it_is_the_only_one(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nhunter2\n")
    (record,) = read_key_file(str(file))
    assert keys("revoke", "--file", str(file), record.key_id) == 0
    accepted = ApiKeys(read_key_file(str(file)))
    with pytest.raises(RequestError):
        accepted.caller("Bearer hunter2")
    assert accepted.ended(record.key_id, record.tenant) == "api_key_revoked"
    assert "hunter2" not in file.read_text() and file.read_text().startswith("# ours\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tenant", "a b"], "--tenant must be 1 to 64 of"),
        (["--tenant", "a", "--expires", "soon"], "--expires must be a time from now, as 90d"),
        (["--tenant", "a", "--expires", "2001-01-01"], "is over before the key is valid"),
        (["--tenant", "a", "--tokens-per-day", "0"], "--tokens-per-day must be a number as 500"),
        (["--tenant", "a", "--weight", "0"], "--weight must be a number above 0"),
        (["--tenant", "a", "--max-priority", "101"], "--max-priority must be 0 to 100"),
        (["--tenant", "a", "--note", "a\tb"], "'note' must be a text"),
    ],
)
def test_mistakes_are_named_and_change_nothing(
    tmp_path: Path, capsys: Capture, arguments: list[str], says: str
) -> None:
    file = tmp_path / "keys"
    assert keys("add", "--file", str(file), *arguments) == 2
    shown = capsys.readouterr()
    assert says in shown.err and not shown.out and not os.listdir(tmp_path)


def test_an_unknown_id_is_named(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys"
    added(file, capsys, "--tenant", "a")
    assert keys("revoke", "--file", str(file), "nobody") == 2
    assert "has no key nobody; `penstock keys list" in capsys.readouterr().err


def test_a_whole_key_and_a_file_that_is_not_there_are_no_unknown_ids(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "keys"
    key = added(file, capsys, "--tenant", "a")
    assert keys("revoke", "--file", str(file), key) == 2
    told = capsys.readouterr().err
    assert f"by its id, and not by the whole key: {key.split('_')[1]}\n" in told and key not in told
    assert keys("revoke", "--file", f"{file}2", "unknown") == 2
    assert "keys2: No such file" in capsys.readouterr().err


def test_a_command_without_a_key_is_told_how_to_give_one() -> None:
    _, record = key_of()
    with Serving(ScriptedBackend(), api_keys=[record]) as serving:
        for url in (serving.base_url, f"grpc://{serving.grpc_target}"):
            with pytest.raises(ServerError, match="--api-key-file FILE"), connect(url) as server:
                server.models()


def test_standard_output_has_the_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    program = [sys.executable, "-m", "penstock.deployments.cli"]
    arguments = ["keys", "add", "--file", str(file), "--tenant", "acme"]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=True)
    assert parse_key(done.stdout.removesuffix("\n")) is not None
    assert "shown this once" in done.stderr
