"""The two models that ship in the package: real checkpoints, one tokenizer, honest cards."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
BUILTIN = ROOT / "workers" / "weights" / "builtin"
CORPUS = ROOT.parent / "shared" / "data" / "classics"
MODELS = ("dense", "moe")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SLICE_TOKENS = 4096
WINDOW = 2048


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUILTIN / "dense", local_files_only=True)


@pytest.fixture(scope="module")
def models():
    return {
        name: AutoModelForCausalLM.from_pretrained(
            BUILTIN / name, dtype=torch.float32, local_files_only=True
        ).eval()
        for name in MODELS
    }


def card(name: str) -> dict:
    """The front matter of a model's card."""
    text = (BUILTIN / name / "README.md").read_text(encoding="utf-8")
    return yaml.safe_load(text.split("---")[1])


@pytest.mark.parametrize("file", TOKENIZER_FILES)
def test_both_models_share_one_tokenizer(file):
    dense, moe = ((BUILTIN / name / file).read_bytes() for name in MODELS)
    assert dense == moe


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(max_size=80))
def test_tokenizer_gives_back_any_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "a  b   c\t\td \n\n\r\n e ",
        " \u00a0\u2003\u200b\ufeff",
        "e\u0301 is not \u00e9, \ufb01 is not fi",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd",
        "नमस्ते 漢字かな العربية 한국어 ไทย",
        "".join(map(chr, range(0x180))),
        "I'LL don't 1234567 <|im_end|> <|im_ end|>",
    ],
)
def test_tokenizer_gives_back_hard_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_vocabulary_holds_every_byte_and_the_special_tokens(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(8192))
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    # The byte-level alphabet has one character for each byte value; a missing one loses text.
    assert sum(len(token) == 1 for token in vocabulary) == 256


def test_chat_template_renders_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "You are a storyteller."},
        {"role": "user", "content": "Go on."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|endoftext|><|im_start|>system\nYou are a storyteller.<|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed == text.removesuffix("<|im_start|>assistant\n")
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == [0, 1]
    assert tokenizer.encode("Go on.")[0] == 0


@pytest.mark.parametrize(
    ("name", "architecture"), [("dense", "LlamaForCausalLM"), ("moe", "MixtralForCausalLM")]
)
def test_checkpoints_are_the_architectures_they_say(models, name, architecture):
    model = models[name]
    assert type(model).__name__ == architecture
    assert model.config.vocab_size == 8192
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == WINDOW
    assert model.generation_config.eos_token_id == [0, 2]
    assert sum(p.numel() for p in model.parameters()) == card(name)["parameters"]
    if name == "moe":
        assert model.config.num_local_experts == 8
        assert model.config.num_experts_per_tok == 2


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_finite_bf16_safetensors(name):
    with safe_open(BUILTIN / name / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
            tensor = file.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert tensor.isfinite().all(), key
    assert json.loads((BUILTIN / name / "config.json").read_text())["dtype"] == "bfloat16"


def test_both_models_together_stay_small():
    assert sum(file.stat().st_size for file in BUILTIN.rglob("*") if file.is_file()) < 120e6


@torch.no_grad()
def slice_perplexity(model, ids: list[int]) -> float:
    """Perplexity of ids[1:], in windows of WINDOW tokens that do not see each other, each behind
    ids[0]."""
    total = 0.0
    for start in range(0, len(ids) - 1, WINDOW):
        part = torch.tensor([ids[0], *ids[start + 1 : start + WINDOW + 1]])
        logits = model(input_ids=part[None, :-1], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
    return math.exp(total / (len(ids) - 1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("book", ["emma", "great-expectations"])
def test_held_out_perplexity_is_what_the_card_says(models, tokenizer, name, book):
    path = CORPUS / f"heldout-{book}.txt.xz"
    if not path.exists():
        pytest.skip(f"the held-out book is not on this machine: {path.name}")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = file.read(40_000)
    ids = [0, *tokenizer.encode(text, add_special_tokens=False)][: SLICE_TOKENS + 1]
    assert len(ids) == SLICE_TOKENS + 1
    measured = slice_perplexity(models[name], ids)
    assert measured < 250  # an untrained model of 8,192 entries starts at about 8,192
    assert measured == pytest.approx(card(name)["heldout"][book]["perplexity_slice"], rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_a_chat_answer_ends_by_itself(models, tokenizer, name):
    messages = [{"role": "user", "content": "Write one sentence about the old house."}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    out = models[name].generate(
        **prompt, do_sample=True, max_new_tokens=160, num_return_sequences=8
    )
    answers = out[:, prompt["input_ids"].shape[1] :]
    ended = (answers == 2).any(dim=1)
    assert ended.sum() >= 4
