"""`penstock batch`: what it says of wrong flags and files, before anything runs."""

from __future__ import annotations

import json

import pytest

from penstock.deployments.cli.main import main
from tests.deployments.ports import free_port

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.fixture
def given(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(LINE))
    return path


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--within", "soon"], "--within must be a time as 90s, 30m, 2h or 1d; got 'soon'"),
        (["--within", "-5m"], None),
        (["--priority", "101"], "--priority must be 0 to 100, or none; got '101'"),
        (["--priority", "high"], "--priority must be 0 to 100, or none; got 'high'"),
        (["--max-in-flight", "0"], "--max-in-flight must be at least 1; got 0"),
        (["--config", "a.yaml"], "it needs --model"),
        (["--url", "grpc://127.0.0.1:1"], "cannot read --url 'grpc://127.0.0.1:1'"),
        (["--errors", "OUTPUT"], "must be three different files"),
        (["--url", "http://a", "--model", "builtin"], None),
    ],
)
def test_a_wrong_flag_is_named(given, tmp_path, capsys, flags, named):
    output = tmp_path / "out.jsonl"
    flags = [str(output) if each == "OUTPUT" else each for each in flags]
    assert main(["batch", str(given), str(output), *flags]) == 2
    assert named is None or named in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.jsonl", "out.jsonl"], "there is no file"),
        (["in.jsonl", "nowhere/out.jsonl"], "there is no folder nowhere; make it first"),
        (["in.jsonl", "in.jsonl"], "must be three different files"),
    ],
)
def test_a_wrong_file_is_named(given, tmp_path, capsys, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert main(["batch", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named_with_the_remedy(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("penstock.deployments.batch.server_target.START_S", 0.5)
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["batch", str(given), str(tmp_path / "out.jsonl"), "--url", url]) == 1
    printed = capsys.readouterr().err
    assert f"cannot reach {url}" in printed
    assert "`penstock serve` starts one" in printed


def test_only_the_check(given, tmp_path, capsys):
    assert main(["batch", str(given), str(tmp_path / "out.jsonl"), "--check"]) == 0
    assert capsys.readouterr().out == f"{given}: 1 request, well-formed\n"
    given.write_text("{")
    assert main(["batch", str(given), str(tmp_path / "out.jsonl"), "--check"]) == 2
    assert "line 1: not valid JSON" in capsys.readouterr().err
