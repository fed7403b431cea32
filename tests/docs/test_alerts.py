"""The alerting rules: their cases hold, they ask for what there is, and each has its section."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deployments.ingress.core.errors import CATALOGUE
from tests.deployments.ingress.metrics.test_collector import all_names
from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "prometheus"
PAGE = "docs/operations/alerts.md"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: it is in Debian's prometheus")
@pytest.mark.parametrize(
    "command", [("check", "rules", "alerts.yaml"), ("test", "rules", "tests.yaml")]
)
def test_promtool_accepts_the_rules_and_their_cases(command: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *command], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load((FOLDER / "tests.yaml").read_text())["tests"]
    fires = {
        (case["alertname"], alert["exp_labels"]["severity"])
        for group in cases
        for case in group["alert_rule_test"]
        for alert in case["exp_alerts"]
    }
    assert fires == {(rule["alert"], rule["labels"]["severity"]) for rule in alerts()}


def test_the_rules_ask_for_metrics_and_codes_that_there_are() -> None:
    own = {rule["record"] for rule in rules() if "record" in rule}
    asked = {
        re.sub(r"_bucket$", "", name)
        for rule in rules()
        for name in re.findall(r"\b(?:vllm:|penstock[_:])[\w:]+", rule["expr"])
    }
    assert asked <= all_names() | own and own <= asked
    codes = {
        code
        for rule in rules()
        for each in re.findall(r'code=~"([^"]*)"', rule["expr"])
        for code in each.split("|")
    }
    assert codes and codes <= set(CATALOGUE)


def test_each_alert_leads_to_its_section_and_each_section_is_of_one() -> None:
    sections = re.findall(r"^### (\w+)$", (ROOT / PAGE).read_text(), re.M)
    assert sections == list(dict.fromkeys(rule["alert"] for rule in alerts()))
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"{PAGE}#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
