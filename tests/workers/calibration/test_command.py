"""`penstock quantize --calibrate`: what it writes and says, and the refusals that name a flag."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.deployments.cli.main import main
from penstock.workers.calibration.own_text import own_windows
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from tests.workers.checkpoints import VOCAB_SIZE, make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of one word an id."""
    folder = tmp_path_factory.mktemp("calibrated") / "model"
    shutil.copytree(make_checkpoint("llama"), folder)
    words = {"[UNK]": 0} | {f"w{i}": i for i in range(1, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def text_of(folder: Path, count: int) -> str:
    file = folder / f"text{count}.txt"
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()
    file.write_text(" ".join(f"w{i}" for i in ids))
    return str(file)


def test_it_writes_the_same_bytes_twice(model: Path, tmp_path: Path, capsys):
    text = text_of(tmp_path, 3000)
    for out in ("a", "b"):
        given = [str(model), str(tmp_path / out), "--weights", "int4", "--calibrate", text]
        options = ["--calibration-tokens", "1024", "--no-progress"]
        assert main(["quantize", *given, *options]) == 0
    said = capsys.readouterr().out
    assert "21 weights in int4, 4.5" in said and f"2 windows of 512 tokens of {text} (gptq)" in said
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b")]
    assert files[0] == files[1]
    assert load_model(tmp_path / "a", progress=False).weights.format == "int4"


def test_the_model_writes_the_text_itself(model: Path, tmp_path: Path, capsys):
    """Its first token begins each window, and the rest is what it says at temperature 1."""
    options = ["--grid", "steps", "--calibrate", "self", "--calibration-tokens", "1024"]
    for out in ("a", "b"):
        given = [str(model), str(tmp_path / out), "--to", "int4", *options]
        assert main(["quantize", *given]) == 0
    said = capsys.readouterr()
    assert "windows of 511 tokens that the model wrote (gptq)" in said.out
    assert "21 weights in int4, 5.455 bits a weight" in said.out
    assert "write a text" in said.err
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b")]
    assert files[0] == files[1]
    found = own_windows(model, 1024)
    assert [len(ids) for ids in found] == [511, 511] and found[0] != found[1]
    assert {ids[0] for ids in found} == {ModelConfig.from_pretrained(model).bos_token_id}
    assert load_model(tmp_path / "a", progress=False).weights.format == "int4"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--to", "int8", "--calibrate", "TEXT"], "--calibrate is for --to int4"),
        (["--to", "int4", "--act-order"], "--act-order is for calibrated weights"),
        (["--to", "int8", "--group-size", "64"], "--group-size is for --to int4, not int8"),
        (["--to", "nf4", "--grid", "symmetric"], "--grid is for --to int4, not nf4"),
        (["--to", "int4", "--calibrate", "/none.txt"], "/none.txt is not a file"),
        (["--to", "int4", "--calibrate", "/none.txt"], "or self, with which the model writes one"),
        (["--to", "int4", "--calibrate", "TEXT"], "has 300 tokens; at least 4096 are needed"),
        (["--to", "int4", "--calibrate", "BYTES"], "cannot be read as UTF-8"),
        (["--to", "int4", "--calibrate", "TEXT", "--damping", "0"], "--damping must lie above"),
        (
            ["--to", "int4", "--calibrate", "TEXT", "--calibration-tokens", "12"],
            "--calibration-tokens must be at least 256",
        ),
        (["--to", "int4", "--calibrate", "TEXT", "--out", "x"], "OUT and --out both name"),
    ],
)
def test_refusals_name_the_flag(model: Path, tmp_path: Path, capsys, options: list[str], why: str):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00w")
    names = {"TEXT": text_of(tmp_path, 300), "BYTES": str(tmp_path / "bytes.txt")}
    options = [names.get(each, each) for each in options]
    assert main(["quantize", str(model), str(tmp_path / "out"), *options]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_that_hold_codes_already(model: Path, tmp_path: Path, capsys):
    text = text_of(tmp_path, 3000)
    out = ["--calibrate", text, "--calibration-tokens", "512", "--no-progress"]
    first = tmp_path / "first"
    assert main(["quantize", str(model), str(first), "--to", "int4", *out]) == 0
    again = ["quantize", str(first), str(tmp_path / "again"), "--to", "int4", *out]
    assert main(again) == 2
    assert "already quantised (int4)" in capsys.readouterr().err
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert main(["quantize", str(nothing), str(tmp_path / "x"), "--to", "int4", *out]) == 2
    assert "config.json" in capsys.readouterr().err
