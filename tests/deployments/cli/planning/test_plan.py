"""`penstock plan`: its table, its file, its picture, and what it says to bad flags."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from penstock.deployments.cli.main import main
from penstock.deployments.cli.planning.plan_report import MOST_DRAFTED
from penstock.workers.engine.draft import MAX_SEQS
from penstock.workers.memory.kv_format import kv_format
from penstock.workers.planning.group import LINKS, Group
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES
from tests.workers.models.test_gguf_experts import file_of
from tests.workers.test_mixture_configs import MINIMAX

ROOT = Path(__file__).parents[4]


def plan(tmp_path, *arguments):
    path = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_quantised_checkpoint(tmp_path, capsys):
    """FP8 in blocks, by config.json alone, beside the same opened; nothing that rounds twice."""
    (tmp_path / "config.json").write_text(json.dumps(MINIMAX))
    found = plan(tmp_path, str(tmp_path), "--device", "h200", "--kv", "bf16")
    rows = {row["weights"]: row["weight_gb"] for row in found["devices"][0]["rows"]}
    assert list(rows) == ["auto", "bf16"]
    plain = 2 * 200064 * 3072 + 62 * 3072 * 256  # embedding, head, routers
    linear = 228.69e9 - plain
    assert rows["auto"] == pytest.approx((linear * (1 + 4 / 128) + 2 * plain) / 1e9, rel=1e-3)
    assert rows["bf16"] == pytest.approx(2 * 228.69, rel=1e-3)
    assert main(["plan", str(tmp_path), "--weights", "int8"]) != 0
    assert "'int8' is none of auto, bf16, fp32, fp8g" in capsys.readouterr().err


def test_figures_are_the_rooflines(tmp_path, capsys):
    found = plan(
        tmp_path,
        *("Mixtral-8x7B", "--device", "h200,A100", "--weights", "bf16,int4", "--kv", "int8"),
        *("--context", "1000", "--prompt-lens", "7,3000", "--price-per-hour", "2"),
        *("--compute-share", "0.5", "--bandwidth-share", "0.8", "--kv-group", "32"),
    )
    assert [device["name"] for device in found["devices"]] == ["H200", "A100"]
    for device in found["devices"]:
        for row in device["rows"]:
            bound = Roofline(
                SHAPES["Mixtral-8x7B"],
                DEVICES[device["name"]].at(0.5, 0.8),
                row["weights"],
                row["kv"],
                kv_group=32,
                batched_tokens=2048,
                reserve_bytes=1e9,
            )
            batch = bound.largest_batch(1000)
            assert row["batch"] == batch and row["num_blocks"] == bound.num_blocks
            assert (batch == 0) == (device["name"] == "A100" and row["weights"] == "bf16")
            if batch == 0:
                assert row["step_ms"] is row["ttft_ms"] is row["cost_per_million"] is None
                continue
            step = bound.decode(batch, 1000)
            assert row["step_ms"] == pytest.approx(step.seconds * 1e3)
            assert row["memory_ms"] == pytest.approx((step.weights_s + step.kv_s) * 1e3)
            assert row["compute_ms"] == pytest.approx((step.linear_s + step.attention_s) * 1e3)
            assert max(row["memory_ms"], row["compute_ms"]) <= row["step_ms"] * (1 + 1e-9)
            assert row["ttft_ms"]["3000"] == pytest.approx(bound.prefill_s(3000, 2048) * 1e3)
            assert row["cost_per_million"] == pytest.approx(2e6 / 3600 / row["tokens_per_s"])
    said = capsys.readouterr().out
    assert said.count("does not fit") == 1 and "TTFT 3000" in said and "cost/M" in said
    assert "50% of peak compute, 80% of bandwidth" in said


def test_scales_of_kv_are_the_engines_unless_said(tmp_path):
    """fp16 scales with int8: for 32 dimensions, or the head where 32 does not divide it."""

    def kv_bytes(model, *flags):
        found = plan(tmp_path, model, "--device", "A100", "--kv", "int8", *flags)
        return found["devices"][0]["rows"][0]["kv_bytes_per_token"]

    elements = 32 * 2 * 32 * 128  # Llama-2-7B: layers, K and V, heads, dimensions
    assert kv_bytes("Llama-2-7B") == elements + 2 * elements / 32
    assert kv_bytes("Llama-2-7B", "--kv-group", "head") == elements + 2 * elements / 128
    assert kv_bytes("Llama-2-7B", "--kv-group", "0") == elements
    folder = tmp_path / "heads-of-48"
    folder.mkdir()
    stated = json.loads((ROOT / "workers/weights/builtin/dense/config.json").read_text())
    stated |= {"head_dim": 48, "num_hidden_layers": 1, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(stated))
    assert kv_bytes(str(folder)) == 2 * 2 * (48 + 2)
    for model, head_dim in (("Llama-2-7B", 128), (folder, 48)):
        group = kv_format("int8", "auto", head_dim, torch.bfloat16).group
        assert kv_bytes(str(model), "--kv-group", str(group)) == kv_bytes(str(model))


def test_output_projections_and_the_head_as_the_engine_quantises_them(tmp_path):
    def weights(model, *flags):
        found = plan(tmp_path, model, "--device", "A100", "--weights", "bf16,int8", *flags)
        plain, _, quantised, _ = found["devices"][0]["rows"]  # of each with KV in bf16, int8
        return plain["weight_gb"] * 1e9, quantised["weight_gb"] * 1e9, quantised["ttft_ms"]["1024"]

    d, vocab = 4096, 32000
    plain, quantised, ttft_ms = weights("Llama-2-7B")
    without_o = weights("Llama-2-7B", "--no-quantize-o")
    assert without_o[0] == plain and without_o[2] > ttft_ms
    assert without_o[1] - quantised == pytest.approx(32 * (d * d - 4 * d), abs=1)
    with_head = weights("Llama-2-7B", "--quantize-lm-head")
    assert with_head[0] == plain and quantised - with_head[1] == pytest.approx(vocab * d, abs=1)
    tied, copied = weights("Qwen2.5-0.5B"), weights("Qwen2.5-0.5B", "--quantize-lm-head")
    assert tied[0] == copied[0] and copied[1] - tied[1] == pytest.approx(151936 * 896, abs=1)


def test_a_batch_of_ones_own_and_a_checkpoint(tmp_path):
    rows = plan(tmp_path, "builtin-moe", "--device", "cpu", "--weights", "fp32", "--kv", "fp32")
    (row,) = rows["devices"][0]["rows"]
    fewer = plan(
        tmp_path,
        *("builtin-moe", "--device", "cpu", "--weights", "fp32", "--kv", "fp32", "--batch", "3"),
    )
    (three,) = fewer["devices"][0]["rows"]
    assert row["batch"] > three["batch"] == 3 and row["step_ms"] > three["step_ms"]
    folder = str(ROOT / "workers" / "weights" / "builtin" / "moe")
    assert plan(tmp_path, folder, "--device", "cpu")["parameters"] == rows["parameters"]


def test_a_gguf_file_as_it_is_served(tmp_path):
    """`auto`, the default, is the file's own codes; int4 would leave them as they are."""
    pytest.importorskip("gguf", reason="the package gguf, which writes the file, is missing")
    file = str(file_of("Q4_K"))
    found = plan(tmp_path, file, "--device", "L4", "--kv", "int8")["devices"][0]["rows"]
    assert [row["weights"] for row in found] == ["auto", "bf16", "int8", "fp8", "nf4"]
    (same,) = plan(tmp_path, file, "--device", "L4", "--kv", "int8", "--weights", "int4")[
        "devices"
    ][0]["rows"]
    assert same == found[0]
    # With scales and zero points of 32 weights, and the head; the embedding in bf16.
    matrices = 3 * (256 * 256 * (1 + 2 * 0.5 + 1) + 4 * 3 * 256 * 256) + 199 * 256
    plain = 199 * 256 + 3 * (4 * 256 + 2 * 256 + 2 * 64) + 256
    assert found[0]["weight_gb"] * 1e9 == pytest.approx(0.75 * matrices + 2 * plain)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    arguments = ["--device", "H200,4090", "--weights", "bf16,int4", "--plot", str(path)]
    assert main(["plan", "Mixtral-8x7B", *arguments]) == 0  # on one of them nothing fits
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_pages_example_is_what_it_prints(capsys):
    page = (ROOT / "docs" / "operations" / "capacity-planning.md").read_text()
    example = re.search(r"    \$ penstock (.*)\n((?:    .*\n|\n)+)", page)
    assert example is not None and main(example[1].split()) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.strip() for line in example[2].splitlines() if line.strip()] == said


def test_help_teaches_and_loads_no_torch():
    code = (
        "import sys\nfrom penstock.deployments.cli.main import main\n"
        "try: main(['plan', '--help'])\nexcept SystemExit: pass\n"
        "main(['plan', 'Llama-3-8B', '--device', 'L4'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("examples:", "Qwen2.5-0.5B", "4090", "nt: the ridge"):
        assert word in done.stdout


def test_a_draft_model_is_planned_for_as_many_sequences_as_the_engine_drafts_for():
    assert MOST_DRAFTED == MAX_SEQS


@pytest.mark.parametrize("other", [None, "Llama-3.2-1B"])
def test_a_draft_model_takes_memory(other, tmp_path, capsys):
    """The model itself takes weights alone; another one has a KV block beside each of the model."""
    flags = ("Llama-3.1-8B", "--device", "4090", "--weights", "bf16", "--kv", "bf16")
    (plain,) = plan(tmp_path, *flags)["devices"][0]["rows"]
    assert "draft" not in capsys.readouterr().out and plain["draft_gb"] is None
    more = () if other is None else ("--draft-model", other)
    (row,) = plan(tmp_path, *flags, "--speculate", "draft", *more)["devices"][0]["rows"]
    shape = SHAPES[other or "Llama-3.1-8B"]
    alone = Roofline(
        shape, DEVICES["4090"], "int4", "bf16", 32, quantised_head=True, wide_layers=False
    )
    shared = 0 if other else 2 * shape.vocab_size * shape.hidden_size
    assert row["draft_gb"] == pytest.approx((alone.weight_bytes - shared) / 1e9)
    assert row["draft_ms"] == pytest.approx(alone.decode(row["batch"], 2048).seconds * 1e3)
    block = 16 * plain["kv_bytes_per_token"]
    block_with = block + (16 * alone.kv_bytes_per_token if other else 0)
    free = plain["num_blocks"] * block - row["draft_gb"] * 1e9
    assert row["num_blocks"] == pytest.approx(free / block_with, abs=1.5)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("draft GB   draft ms") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Llama-3-8"], "not a folder with a config.json.*did you mean 'Llama-3-8B'"),
        (["org/name"], "not a folder with a config.json"),
        (["Llama-3-8B", "--device", "H300"], "unknown device 'H300'; did you mean 'H200'"),
        (["Llama-3-8B", "--device", "hare"], r"mean 'here'\? \(known: H200, H100, A100, L4,"),
        (["Llama-3-8B", "--device", ","], "--device needs at least one name"),
        (["Llama-3-8B", "--weights", "int3"], "--weights: 'int3' is none of fp32"),
        (["Llama-3-8B", "--weights", "auto"], "--weights: 'auto' is none of fp32"),
        (["Llama-3-8B", "--kv", "int4"], "--kv: 'int4' is none of"),
        (["Llama-3-8B", "--kv-group", "48"], "kv_group must divide"),
        (["Llama-3-8B", "--kv-group", "all"], "--kv-group takes a number, head or auto"),
        (["Llama-3-8B", "--context", "9000"], "--context 9000 is longer than the model's 8192"),
        (["Llama-3-8B", "--prompt-lens", "1,x"], "--prompt-lens takes whole numbers"),
        (["Llama-3-8B", "--prompt-lens", "1,8193"], r"--prompt-lens must lie in \[1, 8192\]"),
        (["Llama-3-8B", "--draft-model", "Llama-3.2-1B"], "needs --speculate draft"),
        (
            ["Llama-3-8B", "--speculate", "draft", "--draft-model", "SmolLM2-135M"],
            "draft model: it has 49152 tokens and the model 128256",
        ),
        (
            ["Llama-3-8B", "--speculate", "draft", "--tensor-parallel-size", "2"],
            "draft model: a group of devices has none",
        ),
        (["Llama-3-8B", "--compute-share", "0"], "share of peak compute must be in"),
    ],
)
def test_bad_flags(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err) and not said.out


def test_bad_numbers(capsys):
    for flag in ("--price-per-hour", "--reserve-gb"):
        assert main(["plan", "Llama-3-8B", flag, "nan"]) == 2
        assert "nan is not a number from 0 on" in capsys.readouterr().err


def test_this_machine_is_measured(tmp_path, capsys, monkeypatch):
    """A quick look: each figure is there, and the step is slower than reading its weights."""
    from penstock.deployments.cli.planning import measure

    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "READ_BYTES", 4e6)
    of_files = psutil.virtual_memory()._replace(available=6 << 30, free=1 << 20)  # they are cached
    monkeypatch.setattr(psutil, "virtual_memory", lambda: of_files)
    threads = torch.get_num_threads()
    found = plan(
        tmp_path,
        *("builtin", "--device", "here,L4", "--weights", "bf16,int8,int4"),
        *("--batch", "4", "--context", "256"),
    )
    assert torch.get_num_threads() == threads
    here, table = found["devices"]
    assert set(here["reads"]) == {"fp32", "bf16", "int8", "int4"} and not here["overlaps"]
    assert here["memory_bytes"] == 6 << 30
    assert (
        set(here["flops"]) == {"fp32", "bf16", "int8", "attention"}
        and here["layer_s"] >= 0 <= here["row_s"]
    )
    assert table["name"] == "L4" and not table["reads"]
    for row in here["rows"]:
        assert row["batch"] == 4 and row["step_ms"] >= row["memory_ms"] > 0
    printed = capsys.readouterr()
    assert "`here` is measured" in printed.out and "measuring this machine's CPU" in printed.err


def test_groups_share_bytes_and_time(tmp_path, capsys):
    found = plan(
        tmp_path,
        *("Llama-3.1-70B", "--device", "H100", "--weights", "bf16", "--kv", "bf16"),
        *("-tp", "1,2,4,8", "--link", "pcie", "--batch", "4", "--price-per-hour", "2"),
    )
    rows = {row["ranks"]: row for row in found["devices"][0]["rows"]}
    assert list(rows) == [1, 2, 4, 8]
    assert rows[1]["batch"] == 0 and rows[8]["batch"] == 4  # 141 GB do not fit one card of 80
    assert rows[4]["weight_gb"] < 0.53 * rows[2]["weight_gb"]  # the embedding is on each
    for ranks in (2, 4, 8):
        group = Group(ranks, LINKS["pcie"])
        model = SHAPES["Llama-3.1-70B"]
        calls, sent = 80 * 4 + 1, 4 * (80 * (3 * 8192 + 28672) + 128256) * 2 * (ranks - 1) / ranks
        assert group.calls(model) == calls and group.sent_bytes(model, 4, 4, 2) == sent
        assert rows[ranks]["exchange_ms"] == pytest.approx(calls * 0.025 + sent / 22e9 * 1e3)
        parts = ("memory_ms", "exchange_ms")
        assert rows[ranks]["step_ms"] == pytest.approx(sum(rows[ranks][each] for each in parts))
        per_token = ranks * 2 / 3600 / rows[ranks]["tokens_per_s"] * 1e6
        assert rows[ranks]["cost_per_million"] == pytest.approx(per_token)
    table = capsys.readouterr().out
    assert " tp " in table and "link ms" in table


def test_experts_in_columns_and_whole(tmp_path):
    """As many bytes of weights on each rank; a gather more a layer in columns."""
    flags = (
        "Mixtral-8x7B",
        "--device",
        "H200",
        "--weights",
        "bf16",
        "-tp",
        "2",
        "--batch",
        "4",
        "--kv",
        "bf16",
    )

    (columns,), (whole,) = (
        plan(tmp_path, *flags, *more)["devices"][0]["rows"] for more in ((), ("-ep",))
    )
    assert columns["weight_gb"] == whole["weight_gb"]
    model, link = SHAPES["Mixtral-8x7B"], LINKS["nvlink"]
    cut, kept = Group(2), Group(2, whole_experts=True)
    assert (cut.calls(model), kept.calls(model)) == (32 * 4 + 1, 32 * 3 + 1)
    more = 4 * 32 * 2 * 14336 * 2 / 2  # rows, layers, routes, inner columns, bytes; half of them
    assert cut.sent_bytes(model, 4, 4, 2) - kept.sent_bytes(model, 4, 4, 2) == more
    further_ms = 1e3 * (32 * link.call_s + more / link.bandwidth)
    assert columns["exchange_ms"] - whole["exchange_ms"] == pytest.approx(further_ms)
    # Too narrow for the ranks: whole all the same.
    assert not Group(897).cuts_experts(model) and Group(896).cuts_experts(model)


@pytest.mark.parametrize(
    ("value", "message"),
    [("128", r"must lie in \[1, 64\]"), ("two", "takes whole numbers"), ("0", "must lie in")],
)
def test_groups_that_cannot_be(value, message, capsys):
    assert main(["plan", "Llama-3.1-70B", "--tensor-parallel-size", value]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_ranks_with_the_same_kv_head_have_a_copy_each(tmp_path):
    """Llama-3.1-70B has 8 KV heads: sixteen ranks have as much K and V each as eight."""
    flags = ("Llama-3.1-70B", "--device", "H100", "-tp", "8,16", "--batch", "4")
    rows = {row["ranks"]: row for row in plan(tmp_path, *flags)["devices"][0]["rows"]}
    assert list(rows) == [8, 16] and rows[16]["weight_gb"] < rows[8]["weight_gb"]
    model = SHAPES["Llama-3.1-70B"]
    assert Group(8).kv_share(model) == Group(16).kv_share(model) == 1 / 8
