"""Thresholds of neurons: how they are made, kept and read, and which share they keep."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.workers.errors import LoadError
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.neurons.thresholds import KEEPS, Calibration, ScoreHistograms
from tests.workers.checkpoints import random_prompt
from tests.workers.experts.test_modes import load
from tests.workers.models.test_decoder import PagedDecoder, Tokens


def test_thresholds_that_are_not_used(thresholds, tmp_path):
    with pytest.raises(LoadError, match=r"neuron_thresholds\.json is missing"):
        load("olmoe", mode="sparse")
    with pytest.raises(LoadError, match="belongs to another model"):
        load("olmoe", mode="sparse", thresholds=thresholds("qwen3_moe"))
    good = json.loads(Path(thresholds("olmoe")).read_text())
    for name, change in {
        "keeps": [0, 1],
        "format": "int3",
        "thresholds": {},
        "layers": [0],
    }.items():
        (tmp_path / "bad").write_text(json.dumps({**good, name: change}))
        with pytest.raises(LoadError, match="not a file of neuron thresholds"):
            load("olmoe", mode="sparse", thresholds=str(tmp_path / "bad"))


def test_thresholds_are_quantiles():
    """Against numpy's, within the width of a bin; an expert that saw little has its layer's."""
    random = np.random.default_rng(0)
    scores = {(0, e): random.exponential(10.0**e, (1200, 30)) for e in range(2)}
    scores[0, 2] = random.exponential(5.0, (20, 30))
    found = ScoreHistograms(1, 3)
    for (place, expert), values in scores.items():
        kinds = {kind: torch.from_numpy(values) for kind in ("gate", "up", "product")}
        found.add(place, expert, kinds)
    table = found.table("up")[0]
    pooled = np.concatenate([values.ravel() for values in scores.values()])
    for expert, values in enumerate((scores[0, 0], scores[0, 1], pooled)):
        for keep, threshold in zip(KEEPS[1:-1], table[expert][1:-1], strict=True):
            assert threshold == pytest.approx(np.quantile(values, 1 - keep), rel=0.03)
        assert table[expert][-1] == 0
    made = Calibration.of(found, routers="", format="int8", text="", num_tokens=0, layers=[3])
    at = made.at("up", 0.5)
    assert at[3, 1] == table[1][10]
    assert table[1][11] < made.at("up", 0.525)[3, 1] < table[1][10]


def test_the_file_comes_back_as_it_was(thresholds, tmp_path):
    made = Calibration.load(Path(thresholds("olmoe")))
    made.save(tmp_path / "again")
    assert Calibration.load(tmp_path / "again") == made
    assert made.num_tokens >= 640 and made.layers == (0, 1, 2)


def test_kept_shares_are_those_configured():
    """On text that the thresholds were not made from: within a few per cent of the neurons."""
    model = load("builtin-moe", mode="sparse", keep=0.5, num_slots=32)
    ids = random_prompt(96)
    rows = StepRows.of([("sparse", 0, 0, len(ids))], model.device)
    paged, seq = PagedDecoder(model), Tokens(list(ids))
    model.forward = functools.partial(model.forward, moe_rows=rows)
    with torch.inference_mode():
        paged.step((seq, len(ids)))
    model.routed.close()
    assert rows is not None
    seen = 1 - rows.num_skipped.sum().item() / rows.num_neurons.sum().item()
    assert 0.35 < seen < 0.65
