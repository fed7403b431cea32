"""`penstock completion`: the script for bash in a real bash; the others where their shell is."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from penstock.deployments.cli.completion import SHELLS, commands_of
from penstock.deployments.cli.main import build_parser, main


def script(shell, capsys) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(capsys, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=(penstock {quoted}); COMP_CWORD={len(words)}; _penstock"
    lines = [script("bash", capsys), ask, r"""printf '%s\n' "${COMPREPLY[@]}" """]
    done = subprocess.run(
        ["bash", "-u", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split()


def test_bash_offers_commands_flags_and_values(capsys):
    assert completed(capsys, "ser") == ["serve"]
    assert {"serve", "chat", "bench", "completion"} <= {*completed(capsys, "")}
    assert completed(capsys, "serve", "--kv-c") == ["--kv-cache-gb", "--kv-commit"]
    assert completed(capsys, "serve", "m", "--kv", "") == ["auto", "int8", "fp8"]
    assert {"serve", "offline", "ablate"} <= {*completed(capsys, "bench", "")}
    assert completed(capsys, "bench", "serve", "--arr") == ["--arrivals"]
    assert completed(capsys, "bench", "serve", "--arrivals", "p") == ["poisson"]
    assert "--kv-cache-dtype" not in completed(capsys, "serve", "--")  # vLLM's


def test_bash_offers_files_elsewhere(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    assert completed(capsys, "serve", "my") == ["my", "model"]  # one file, split by the test


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_for_the_shell(shell, capsys):
    text = script(shell, capsys)
    for command in commands_of(build_parser(), "penstock"):
        assert command.path in text
        for flag in command.flags:
            assert all(name.lstrip("-") in text for name in flag.names)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    subprocess.run([shell, "-n"], input=text, text=True, timeout=60, check=True)
