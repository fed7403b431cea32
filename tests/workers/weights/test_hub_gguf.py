"""GGUF files of repositories of the hub: which one is meant, and its header without its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.gguf.header import read_header
from penstock.workers.hub_name import HubName, hub_name
from penstock.workers.models.loader import load_model
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.hub_gguf import PIECE_BYTES, chosen_gguf
from penstock.workers.weights.model_digest import model_digest, verified_folder, verified_text
from tests.hub.client import use_hub
from tests.hub.server import Hub, Repository, running_hub
from tests.workers.checkpoints import ALL, random_model
from tests.workers.gguf_files import write_gguf

pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")

NAME = "org/tiny-GGUF"
FILES = ("tiny.F32.gguf", "sub/tiny-Q8_0.gguf", "sub/tiny-q4_0.gguf")
PARTS = ("big-F16-00001-of-00002.gguf", "big-F16-00002-of-00002.gguf")


@pytest.fixture(scope="module")
def published() -> Path:
    """A repository of one model in three types, all larger than a piece."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-gguf-hub-"))
    settings = {**ALL["llama"][1], "intermediate_size": 16384}
    random_model("llama", settings).save_pretrained(folder / "from")
    (folder / "to" / "sub").mkdir(parents=True)
    for name, kind in zip(FILES, ("F32", "Q8_0", "Q4_0")):
        write_gguf(folder / "from", folder / "to" / name, kind, "F32")
        assert (folder / "to" / name).stat().st_size > PIECE_BYTES
    for name in PARTS:
        (folder / "to" / name).write_bytes(b"GGUF")
    return folder / "to"


@pytest.fixture(scope="module")
def repository(published: Path) -> Repository:
    return Repository.of(published, v1=0)


@pytest.fixture
def hub(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.repositories[NAME] = repository
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


@pytest.mark.parametrize(
    ("behind", "file"),
    [
        (":tiny.F32.gguf", FILES[0]),
        (":sub/tiny-Q8_0.gguf", FILES[1]),
        (":Q8_0", FILES[1]),
        (":q8_0", FILES[1]),
        ("@v1:Q4_0", FILES[2]),
    ],
)
def test_a_file_is_named_by_its_path_or_its_type(hub, published, behind, file):
    found = resolve_model(NAME + behind)
    assert found.read_bytes() == (published / file).read_bytes()
    assert set(hub.fetched()) == {file}


def test_the_header_comes_alone_for_a_tokenizer_and_first_for_the_weights(hub, published):
    config = EngineConfig(model=f"{NAME}:Q8_0")
    copy, tokenizer = verified_text(config)
    assert hub.fetched() == [FILES[1]] and hub.ranges == [f"bytes=0-{PIECE_BYTES - 1}"]
    size = (published / FILES[1]).stat().st_size
    assert copy.stat().st_size == size and copy.stat().st_blocks * 512 < PIECE_BYTES
    assert read_header(copy).tensors == read_header(published / FILES[1]).tensors
    assert verified_text(config) == (copy, tokenizer)
    assert len(hub.ranges) == 1  # kept
    whole = verified_folder(config)
    assert hub.ranges[1:] == [""]
    assert model_digest(whole).partition("-")[0] == tokenizer
    assert load_model(whole, progress=False).config.num_layers == 3


def test_a_file_that_cannot_be_served_is_refused_by_its_header(hub, published):
    file = bytearray((published / FILES[1]).read_bytes())
    assert file.count(b"llama") > 3
    hub.repositories["org/x"] = Repository(
        {"1" * 40: {"x.gguf": bytes(file.replace(b"llama", b"mamba"))}}, {"main": "1" * 40}
    )
    with pytest.raises(ConfigError, match="mamba"):
        resolve_model("org/x:x.gguf")
    assert hub.ranges == [f"bytes=0-{PIECE_BYTES - 1}"]


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (":Q5_K_M", rf"has no such GGUF file; name one of its files: .*{FILES[2]}"),
        (":tiny.gguf", "has no such GGUF file"),
        (":F16", rf"{PARTS[0]} is one of several parts, which Penstock does not read"),
        ("", rf"the repository has 5 GGUF files; name one of them, as {NAME}:"),
    ],
)
def test_a_name_that_means_no_file_is_refused_with_those_that_are_there(hub, behind, words):
    for text_only in (False, True):
        with pytest.raises(LoadError, match=words):
            resolve_model(NAME + behind, text_only=text_only)
    assert hub.fetched() == []


def test_a_checkpoint_has_no_types(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub.repositories["org/plain"] = Repository.of(tmp_path)
    with pytest.raises(
        LoadError, match="no GGUF files; write org/plain, and --weights int4 or int8"
    ):
        resolve_model("org/plain:Q4_K_M")


def test_a_type_must_name_one_file():
    name = HubName("org/x", None, "Q4_0")
    with pytest.raises(
        LoadError, match=r"has 2 files of that type; name one of its files: a\.Q4_0"
    ):
        chosen_gguf(name, ["a.Q4_0.gguf", "b-Q4_0.gguf", "c.Q4_0.txt"])
    assert chosen_gguf(name, ["a.Q4_0.gguf", "a.IQ4_0.gguf", "a.Q4_0_4_4.gguf"]) == "a.Q4_0.gguf"


@pytest.mark.parametrize(
    ("model", "parts", "short"),
    [
        ("org/name", ("org/name", None, None), "name"),
        ("org/name@v1.0", ("org/name", "v1.0", None), "name"),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1", None), "name"),
        ("org/name:Q4_K_M", ("org/name", None, "Q4_K_M"), "name:Q4_K_M"),
        ("o/n@main:a/b c.gguf", ("o/n", "main", "a/b c.gguf"), "b c"),
        ("gpt2", ("gpt2", None, None), "gpt2"),
    ],
)
def test_the_parts_of_a_name(model, parts, short):
    found = hub_name(model)
    assert found == HubName(*parts)
    assert found.short == short
    assert hub_name(str(found), found.revision) == found


@pytest.mark.parametrize("model", ["a/b/c", "/a/b", "a/b@", "a/b:", "a/b@x@y", "", "~/a", "a b/c"])
def test_what_is_no_name(model):
    assert hub_name(model) is None
