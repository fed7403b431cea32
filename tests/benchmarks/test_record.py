"""A result file has the envelope that the page of results needs, whichever program writes it."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from benchmarks.common import record
from benchmarks.engine import format_quality
from benchmarks.engine.format_quality import combination_of
from benchmarks.gate.retry_after import figures as retry_after_figures
from benchmarks.gate.retry_after import run_one
from benchmarks.gate.scale import Costs as ScaleCosts
from benchmarks.gate.scale import Size, cost_of
from benchmarks.gate.sim.loads import LOADS
from benchmarks.memory import kv_formats
from penstock.workers.evaluation.figures import Estimate, Scores, figures_of
from penstock.workers.evaluation.judge import Judged, Seconds, WeightSize
from tools.result_files import Result, parse
from tools.result_tables.gate import gate_scale as gate_scale_table
from tools.result_tables.gate import retry_after as retry_after_table
from tools.result_tables.memory import format_quality as format_quality_table
from tools.result_tables.memory import kv_formats as kv_formats_table

PROGRAM = str(record.ROOT / "benchmarks" / "gate" / "latency.py")


def written(path, results) -> Result:
    record.write(path, PROGRAM, results, threads=2)
    return parse("gate-latency/machine", json.loads(path.read_text()))


def test_the_envelope_names_program_machine_commit_and_command(tmp_path, monkeypatch):
    path = tmp_path / "new" / "out.json"
    data = str(tmp_path / "traces")
    arguments = ["--rounds", "3", "--json", str(path), "--data", data, "--out=x", "--load", "a b"]
    monkeypatch.setattr(sys, "argv", ["latency.py", *arguments])
    result = written(path, {"paths": {"none": 1}})
    command = "python -m benchmarks.gate.latency --rounds 3 --data traces --load 'a b'"
    assert (result.benchmark, result.command) == ("gate.latency", command)
    assert result.date == datetime.now(UTC).date().isoformat()
    assert result.commit is None or re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", result.commit)
    assert result.machine["cores"] == len(os.sched_getaffinity(0))
    assert result.machine["cpu"] and result.machine["memory_gib"] > 0
    assert result.machine["threads"] == 2
    assert result.runs == [{"paths": {"none": 1}}]


def test_outside_a_checkout_the_commit_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() is None


def test_a_run_without_figures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs figures"):
        record.write(tmp_path / "out.json", PROGRAM, {})
    assert not (tmp_path / "out.json").exists()


def test_the_rows_of_kv_formats_make_its_table(tmp_path):
    run = {"block_bytes": 2048, "blocks": 10, "peak": 9, "mean": 4.0}
    run |= {"preemptions": 1, "steps": 20, "rate": 100.0}
    twice = run | {"block_bytes": 512, "blocks": 40, "mean": 8.0, "rate": 150.0}
    rows = kv_formats.rows_of({"16 bit": run, "int8 g32": twice})
    table = kv_formats_table(written(tmp_path / "out.json", {"rows": rows}))
    assert table.splitlines()[-1] == "| int8 g32 | 512 | 40 | 8.0 | 2.00x | 1 | 150 (1.50x) |"


def judged(combination, nll: list[list[float]]) -> Judged:
    base = scores_of([[1.0, 2.0], [3.0, 4.0]])
    figures, size = figures_of(scores_of(nll), base), WeightSize(100, 8.125, "int8")
    seconds = Seconds(0.0, 0.0, 0.0)
    return Judged(combination, figures, base, size, "float32", "float32", 64.0, seconds)


def scores_of(nll: list[list[float]]) -> Scores:
    values = np.array(nll)
    return Scores(values, np.zeros(values.shape, np.int64), np.zeros_like(values))


def test_the_figures_of_format_quality_make_its_table(tmp_path):
    names = [("fp32", "auto"), ("int8", "auto"), ("int8", "fp8")]
    shifts = [0.0, 0.01, 0.02]
    found = [
        (*name, judged(combination_of(*name), [[1.0 + x, 2.0 + x], [3.0 + x, 4.0 + x]]))
        for name, x in zip(names, shifts)
    ]
    result = written(tmp_path / "out.json", format_quality.figures("smollm2", found))
    lines = format_quality_table(result).splitlines()
    assert lines[0] == "| weights (smollm2) | KV plain | KV fp8 |"
    assert lines[-1] == "| int8 | +1.00 ± 0.00 % | +2.02 ± 0.00 % |"
    assert result.figures["rows"][1]["bits_per_weight"] == 8.125
    one = judged(combination_of("int8", "auto"), [[1.0, 2.0], [3.0, 4.0]])
    alone = replace(one, figures=replace(one.figures, change=Estimate(0.0, None)))
    with pytest.raises(ValueError, match="--windows 2"):
        format_quality.figures("smollm2", [("int8", "auto", alone)])


def test_the_names_of_format_quality_are_settings():
    made = combination_of("int8-row", "int8-64")
    assert (made.weights, made.int8_group, made.kv, made.kv_group) == ("int8", "row", "int8", "64")
    assert combination_of("bf16", "auto").activations == "bf16"
    int4 = combination_of("int4-32", "auto")
    assert (int4.int4_group, int4.int4_activations, int4.activations) == ("32", "auto", "fp32")
    assert combination_of("int4-plain", "auto").int4_activations == "plain"
    assert combination_of("int8-no-o", "fp8").kv_group == "head"
    assert combination_of("nf4-head", "auto").quantize_lm_head


def test_the_rows_of_the_gates_scale_make_its_table(tmp_path):
    costs = ScaleCosts([cost_of(Size(workers=1, queue=0, requests=20))])
    table = gate_scale_table(written(tmp_path / "out.json", {"rows": costs.rows()}))
    assert table.splitlines()[-1].startswith("| 1 | empty | 20 |")


def test_a_run_without_refusals_has_no_figures_of_them(tmp_path):
    load = replace(LOADS["reasoning"], num_requests=5)
    run, _ = run_one(load, 0, tmp_path, lambda: None)
    row = {"load": "reasoning", **retry_after_figures([run])}
    result = written(tmp_path / "out.json", {"rows": [row]})
    assert result.figures["rows"][0]["quoted_p50_s"] is None
    assert retry_after_table(result).splitlines()[-1] == "| reasoning | 0 |  |  |  |  |  | 0 % |"
