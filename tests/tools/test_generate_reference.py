"""The reference pages agree with the code: each generated block is what the program makes now."""

from __future__ import annotations

import re
import sys

import pytest

from penstock.deployments.config import settings
from tools import generate_reference

PAGES = {
    "settings.md": "settings",
    "cli.md": "commands",
    "errors.md": "errors",
    "vllm.md": "vllm",
    "metrics.md": "metrics",
    "clients.md": "clients",
    "supported-models.md": "memory",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_committed_page_is_what_the_program_writes(page):
    path = generate_reference.REFERENCE / page
    assert f"<!-- generated: {PAGES[page]} -->" in path.read_text()
    assert generate_reference.pages()[path] == path.read_text(), "run `make docs`"


def test_every_setting_is_in_the_table_with_its_default():
    table = generate_reference.settings_tables()
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {s.name for s in settings()}
    assert "| `http_port` | whole number, in 1 ... 65535 | `8000` |" in table


def test_every_command_has_a_section():
    text = generate_reference.command_tables()
    for command in (
        "serve",
        "chat",
        "bench offline",
        "queue",
        "plan",
        "quantize",
        "eval",
        "calibrate",
    ):
        assert f"## `penstock {command}`\n" in text
    assert "--expert-cache-gb" in text.split("## `penstock calibrate`")[1]
    assert "--http-port" not in text  # settings have a page of their own


def test_a_page_that_is_out_of_date_is_found_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "errors.md"
    page.write_text("# Errors\n\n<!-- generated: errors -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(generate_reference, "REFERENCE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_reference", "--check"])
    assert generate_reference.main() == 1
    assert "errors.md is out of date" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["generate_reference"])
    assert generate_reference.main() == 0
    text = page.read_text()
    assert text.startswith("# Errors\n") and text.endswith("<!-- end -->\nafter\n")
    assert "| `overloaded` | 503 | RESOURCE_EXHAUSTED |" in text and "old" not in text
    monkeypatch.setattr(sys, "argv", ["generate_reference", "--check"])
    assert generate_reference.main() == 0


def test_metrics_have_a_name_a_type_and_a_meaning():
    rows = [line.split(" | ") for line in generate_reference.metrics_table().splitlines()[2:]]
    assert len(rows) > 40
    assert all(len(row) == 4 and len(row[3]) > 3 for row in rows)
    assert any(row[0] == "| `vllm:time_to_first_token_seconds`" for row in rows)
