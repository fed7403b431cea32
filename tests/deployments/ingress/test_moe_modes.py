"""moe_mode as clients meet it: what they may ask, what is answered; and `penstock calibrate`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.deployments.cli.main import main
from penstock.deployments.client import Client
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.models.loader import load_model
from tests.deployments.serving import EngineBackend, Serving
from tests.workers.checkpoints import make_checkpoint

NUM_NEW = 6
NEURONS = (NUM_NEW - 1) * 4 * 2 * 352  # the last token of an answer is not an input


@pytest.fixture(scope="module")
def sparse():
    settings = ExpertSettings(num_slots=8, prefetch=False, mode="sparse", keep=0.25)
    model = load_model("builtin-moe", weights="fp32", progress=False, experts=settings)
    config = EngineConfig(num_blocks=64, moe_mode="sparse", expert_cache_gb=1.0)
    backend = EngineBackend(Engine(config, model))
    with Serving(backend) as serving:
        yield serving
    backend.stop()
    assert model.routed is not None
    model.routed.close()


def ask(serving, **fields):
    body = {"prompt": "It was", "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{serving.base_url}/v1/completions", json={**body, **fields}, timeout=60)


def test_the_answer_says_what_was_left_out(sparse):
    usage = ask(sparse).json()["usage"]
    assert usage["moe_mode"] == "sparse" and usage["neurons"] == NEURONS
    assert 0.6 < usage["skipped_neurons"] / NEURONS < 0.9
    twice = ask(sparse, n=2).json()["usage"]
    assert twice["neurons"] == 2 * NEURONS and twice["moe_mode"] == "sparse"


def test_a_request_may_be_exact(sparse):
    usage = ask(sparse, moe_mode="exact").json()["usage"]
    assert usage["moe_mode"] == "exact" and "neurons" not in usage


def test_and_nothing_else(sparse):
    for wish, message in (("quantized", "ask for exact or sparse"), ("fast", "moe_mode")):
        answer = ask(sparse, moe_mode=wish)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "moe_mode" and message in error["message"]


def test_over_grpc(sparse):
    with Client(sparse.grpc_target) as client:
        options: dict[str, Any] = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
        usage = list(client.generate("It was", **options))[-1].usage
        assert usage is not None
        assert (usage.moe_mode, usage.neurons) == ("sparse", NEURONS) and usage.skipped_neurons
        usage = list(client.generate("It was", moe_mode="exact", **options))[-1].usage
        assert usage is not None
        assert (usage.moe_mode, usage.neurons) == ("exact", 0)


def test_calibrate(tmp_path, capsys):
    out = tmp_path / "thresholds.json"
    flags = ["--tokens", "96", "--out", str(out), "--expert-store-dir", str(tmp_path)]
    assert main(["calibrate", str(make_checkpoint("olmoe")), *flags, "--format", "int4"]) == 0
    printed = capsys.readouterr()
    assert f"--moe-thresholds {out}" in printed.out and "calibrating" in printed.err
    found = json.loads(out.read_text())
    assert found["format"] == "int4" and len(found["thresholds"]["up"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["thresholds.json"]
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "--moe-mode sparse" in capsys.readouterr().out


def test_what_calibrate_refuses(tmp_path, capsys):
    assert main(["calibrate", "builtin", "--out", str(tmp_path / "t"), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert "`penstock calibrate` is for mixture-of-experts models" in error  # and names no setting
    assert "this one is dense" in error
    assert main(["calibrate", "builtin-moe", "--text", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
