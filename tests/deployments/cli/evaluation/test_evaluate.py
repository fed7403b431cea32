"""`penstock eval` as people run it: its table, its files, and what it says to a misuse."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from penstock.deployments.cli.main import main
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.model_digest import model_digest

SMALL = (
    *("--windows", "3", "--window-tokens", "48", "--greedy-tokens", "4", "--threads", "1"),
    "--no-progress",
)


@pytest.fixture(autouse=True)
def process_of_its_own():
    """The command sets its process up: other tests of this one need their own settings back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words that the built-in model knows, in an order that it does not."""
    words = "the door was open and a lady of his own house came to see what had been said by him"
    order = words.split()
    lines = [" ".join(order[i % 7 :: 1 + i % 3] + order[: i % 11]) + "." for i in range(60)]
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_table_json_and_picture(text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    lists = ["--weights", "fp32,int8", "--int8-group", "64,row", "--kv-dtype", "auto,int8"]
    files = ["--json", str(out), "--plot", str(picture)]
    assert main(["eval", "builtin", "--text", text, *SMALL, *lists, *files]) == 0
    table = capsys.readouterr().out
    found = json.loads(out.read_text())
    names = [(row["weights"], row["int8_group"], row["kv"]) for row in found["rows"]]
    assert names == [
        *(("fp32", "64", "auto"), ("fp32", "64", "int8"), ("int8", "64", "auto")),
        *(("int8", "64", "int8"), ("int8", "row", "auto"), ("int8", "row", "int8")),
    ]
    assert found["model"] == {"name": "builtin", "digest": model_digest(resolve_model("builtin"))}
    assert found["settings"]["windows"] == 3 and found["settings"]["weights"] == ["fp32", "int8"]
    assert found["machine"]["threads"] == 1 and found["machine"]["cpu"]
    assert found["scored_tokens"] == 3 * 47 and found["prefix_ids"] == [0]
    base, changed = found["rows"][0]["figures"], found["rows"][4]["figures"]
    assert base["change"]["value"] == 0 and base["kl"]["mean"]["value"] == 0
    assert changed["kl"]["mean"]["value"] > found["rows"][2]["figures"]["kl"]["mean"]["value"] > 0
    rows = [line for line in table.splitlines() if line.startswith(("fp32", "int8"))]
    assert len(rows) == 6 and "baseline" in rows[0] and rows[4].startswith("int8, group row")
    change = changed["change"]
    assert f"{100 * change['value']:+.2f} ± {100 * change['error']:.2f} %" in rows[4]
    assert "141 tokens scored in 3 windows" in table and "WARNING: 3 windows are few" in table
    svg = picture.read_text()
    assert svg.startswith("<?xml") and "bits per weight" in svg


def test_a_checkpoint_in_a_folder_and_context_policies(text, tmp_path, capsys):
    folder = tmp_path / "mine"
    shutil.copytree(resolve_model("builtin"), folder)
    policy = ["--weights", "auto", "--context-policy", "full,4+16/8", "--greedy-tokens", "0"]
    assert main(["eval", str(folder), "--text", text, *SMALL, *policy]) == 0
    table = capsys.readouterr().out
    assert [line.split()[2] for line in table.splitlines()[1:4]] == ["full", "full", "4+16/8"]
    assert "greedy" not in table


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--text is missing: name one or more files"),
        (["--text", "none.txt"], "--text none.txt cannot be read"),
        (["--text", "TEXT", "--weights", "int3"], "'int3' is none of auto, fp32"),
        (["--text", "TEXT", "--windows", "0"], "0 is not at least 1"),
        (["--text", "TEXT", "--windows", "500"], "give a longer text, fewer windows (--windows)"),
        (["--text", "TEXT", "--context-policy", "4-8"], "SINKS+WINDOW"),
        (["--text", "TEXT", "--json", "no/such/out.json"], "the folder does not exist"),
        (["--text", "TEXT", "--plot", "out.gif"], "must end in .svg"),
        (["--text", "TEXT", "--kv", "int8", "--kv-group", "64,8,7"], "'7' is none of"),
        (["--text", "TEXT", "--window-tokens", "4096"], "--window-tokens 2047 or fewer"),
    ],
)
def test_a_misuse_is_named_and_ends_with_2(text, flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = [text if each == "TEXT" else each for each in flags]
    small = ["--windows", "1"] if "4096" in flags else []
    if small:
        long = tmp_path / "long.txt"
        long.write_text("the door was open and " * 2000, encoding="utf-8")
        given[1] = str(long)
    assert main(["eval", "builtin", *given, *small, "--no-progress"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "builtin", "--windows", "1", "--window-tokens", "64", "--text", "TEXT"],
        ["bench", "offline", "builtin", "--num-requests", "1"],
        ["calibrate", "builtin-moe", "--text", "TEXT"],
    ],
)
def test_cuda_without_a_gpu_is_said(command, text, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = [text if each == "TEXT" else each for each in command]
    assert main([*given, "--device", "cuda", "--no-progress"]) == 2
    assert "device is cuda, and PyTorch sees no GPU here" in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_with_1(text, capsys):
    assert main(["eval", "./no-such-folder", "--text", text]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_a_stored_format_is_not_rounded_twice(text, tmp_path, capsys):
    out = tmp_path / "int8"
    assert main(["quantize", "builtin", "--to", "int8", "--out", str(out), "--no-progress"]) == 0
    assert main(["eval", str(out), "--text", text, *SMALL, "--weights", "auto,int4"]) == 2
    assert "quantised as int8 already" in capsys.readouterr().err
