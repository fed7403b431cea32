"""The ablation: each part is really left out, and the table's interval is Student's."""

from __future__ import annotations

import dataclasses
import json
from itertools import chain

import numpy as np
import pytest
from scipy import stats

from penstock.deployments.bench.ablation import Recipe, Run, config_of, engine_for, parts_of
from penstock.deployments.bench.served_ablation import flags_of
from penstock.deployments.cli.ablate import gain_of, t_975
from penstock.deployments.cli.flags.serve import settings_given
from penstock.deployments.cli.main import build_parser, main
from penstock.deployments.config import config_from
from penstock.workers.config import EngineConfig
from penstock.workers.models.loader import load_model


def run(rate: float) -> Run:
    return Run(1.0, round(rate), 4, 0, 9, 3.0)


def test_the_interval_is_students():
    rng = np.random.default_rng(1)
    full, without = rng.integers(80, 120, 7), rng.integers(60, 100, 7)
    logs = np.log(full / without)
    want = stats.t.interval(0.95, 6, logs.mean(), logs.std(ddof=1) / 7**0.5)
    gain, low, high = gain_of([run(each) for each in full], [run(each) for each in without])
    assert gain == pytest.approx(np.expm1(logs.mean()))
    assert (low, high) == pytest.approx(np.expm1(want), rel=0.02)
    for freedom in (2, 3, 4, 9, 30, 200):
        assert t_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)
    few = gain_of([run(100), run(120)], [run(50), run(100)])
    assert few == pytest.approx((np.sqrt(2.4) - 1, 0.2, 1.0))


def test_each_part_is_left_out_alone():
    full = Recipe()
    for part in parts_of(full):
        changed = {
            name
            for name, value in dataclasses.asdict(part.without).items()
            if value != getattr(full, name)
        }
        assert len(changed) == 1, part.name


def test_settings_reach_the_engine():
    model = load_model("builtin", weights="fp32", progress=False)
    config = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32, kv="auto")
    settings = {}
    for part in parts_of(Recipe(weights="fp32", kv="int8")):
        recipe = dataclasses.replace(part.without, weights="fp32", kv="auto")
        engine = engine_for(model, config, recipe, longest_prompt=100)
        settings[part.name] = engine.config
        engine.close()
    assert settings["chunked prefill"].max_num_batched_tokens == 104
    assert settings["prefix cache"].max_num_batched_tokens == 32
    assert [name for name, each in settings.items() if not each.prefix_cache] == ["prefix cache"]
    late = [name for name, each in settings.items() if each.async_scheduling == "off"]
    assert late == ["async scheduling"]
    assert [name for name, each in settings.items() if not each.merge_steps] == ["merge step"]
    assert [name for name, each in settings.items() if not each.fast_sampling] == ["fast sampling"]


def test_the_command(tmp_path, capsys):
    out = tmp_path / "out.json"
    command = "bench ablate builtin --num-requests 4 --input-len 120 --output-len 6 --rounds 1"
    command += " --shared-prefix 32 --max-num-seqs 4 --max-num-batched-tokens 32 --pool-share 2"
    assert main([*command.split(), "--threads", "1", "--no-progress", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["without", "tokens/s", "gain"]
    assert len(lines) == 2 + len(parts_of(Recipe()))
    runs = json.loads(out.read_text())["runs"]
    assert {each["num_tokens"] for (each,) in runs.values()} == {24}
    assert runs["chunked prefill"][0]["num_steps"] < runs["everything"][0]["num_steps"]
    assert all(each["gap_p99_ms"] > 0 for (each,) in runs.values())


FLAGS = ["--num-requests", "4", "--input-len", "40", "--output-len", "6", "--max-num-seqs", "4",
         "--max-num-batched-tokens", "32", "--pool-share", "2", "--threads", "1",
         "--no-progress"]  # fmt: skip


def test_served(tmp_path, capsys):
    """Two servers in turns: the load's tokens from both, and other prompts in each round."""
    out = tmp_path / "out.json"
    command = ["bench", "ablate", "builtin", "--served", "--parts", "prefix", *FLAGS]
    assert main([*command, "--rounds", "2", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["without", "tokens/s"] and len(lines) == 2
    pairs = json.loads(out.read_text())["pairs"]
    assert list(pairs) == ["prefix cache"] and len(pairs["prefix cache"]) == 2
    for run in chain(*pairs["prefix cache"]):
        assert run["num_tokens"] == 24 and 0 < run["ttft_p50_ms"] < 1e3 * run["wall_s"]


def test_parts_by_name(capsys):
    """In one process, and those that no server can leave out."""
    command = ["bench", "ablate", "builtin", *FLAGS, "--rounds", "1"]
    assert main([*command, "--parts", "merge", "text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["merge step", "text beside the steps"]
    assert main([*command, "--parts", "text", "--served"]) == 2
    assert "--parts text: no part of a server has that name; they are: merge, kv" in (
        capsys.readouterr().err
    )


def test_a_server_gets_each_part_as_a_flag():
    """As its own configuration reads them."""
    base = EngineConfig(kv_cache_gb=0.1, max_num_seqs=4, max_num_batched_tokens=32, threads=1)
    for part in parts_of(Recipe()):
        config = config_of(base, part.without, longest_prompt=100)
        flags = flags_of(config, part.without)
        served = config_from(
            settings_given(build_parser().parse_args(["serve", "builtin", *flags]))
        )
        assert served.engine == config and served.admission == part.without.admission
