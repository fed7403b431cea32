"""The digests of a model's files: what they notice, and what makes no difference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.workers.weights import model_digest as module
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.model_digest import model_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("builtin"), tmp_path / "copy"))


def parts(folder: Path) -> list[str]:
    return model_digest(folder).split("-")


def test_a_copy_with_other_notes_is_the_same_model(folder):
    (folder / "README.md").write_text("notes")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(folder) == model_digest(resolve_model("builtin"))
    assert len(set(parts(folder))) == 2


def test_other_weights_change_the_second_part_only(folder, monkeypatch):
    tokenizer, weights = parts(folder)
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-100:] = bytes(100)
    path.write_bytes(data)
    changed = parts(folder)
    assert changed[0] == tokenizer and changed[1] != weights
    # As of a file that is too large to be read as a whole.
    monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr(module, "HEAD_BYTES", 1 << 12)
    sampled = parts(folder)
    data[-100:] = bytes([7]) * 100
    path.write_bytes(data)
    assert parts(folder)[1] != sampled[1]


def test_another_tokenizer_changes_the_first_part_only(folder):
    tokenizer, weights = parts(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    changed = parts(folder)
    assert changed[0] != tokenizer and changed[1] == weights
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    assert parts(folder)[0] != changed[0]
