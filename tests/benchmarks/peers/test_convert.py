"""The GGUF file with other weights: read back, it is the other model, and all else is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.gguf_model import transformers_model
from benchmarks.peers.convert import gguf_size, write_gguf
from tests.workers import gguf_files
from tests.workers.checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")
WORDS = {"model": "gpt2", "tokens": ["a", "b", "c"], "token_type": [1, 1, 3]}


def test_the_weights_are_the_others_and_the_rest_is_kept(tmp_path: Path):
    published, folder = tmp_path / "published.gguf", tmp_path / "other"
    source = make_checkpoint("llama")
    gguf_files.write_gguf(source, published, tokenizer=WORDS, metadata={"rope.freq_base": 10000.0})
    generator = torch.Generator().manual_seed(3)
    other = {
        name: torch.randn(tensor.shape, generator=generator).half().float()
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    folder.mkdir()
    save_file(other, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    write_gguf(published, folder, tmp_path / "out.gguf")
    model = transformers_model(tmp_path / "out.gguf")
    found = dict(model.named_parameters())
    assert set(other) <= set(found)
    for name, tensor in other.items():
        assert torch.equal(found[name], tensor), name
    reader, before = gguf.GGUFReader(tmp_path / "out.gguf"), gguf.GGUFReader(published)
    for name, field in before.fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            assert reader.fields[name].contents() == field.contents(), name
    assert gguf_size(tmp_path / "out.gguf")[0] == 16.0
