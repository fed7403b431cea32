"""Files of models fetched from a hub on this machine, by the hub's own client, over HTTP."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.pooling.pooling import MEAN, Pooling, read_pooling
from penstock.workers.progress import DOWNLOADING, WAITING, Progress
from penstock.workers.weights.hub import commit_of, resolve_model
from penstock.workers.weights.hub_errors import HubUnreachable
from penstock.workers.weights.hub_locks import remove_leftovers
from penstock.workers.weights.model_digest import model_digest, verified_folder, verified_text
from tests.deployments.ports import free_port
from tests.hub.client import process, use_hub
from tests.hub.server import Hub, Repository, running_hub
from tests.workers.checkpoints import make_checkpoint

NAME = "org/tiny"
TEXT = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]
LARGE = 25 << 20  # more than two of the pieces in which the client reads
UNWANTED = ("pytorch_model.bin", "consolidated.safetensors", "README.md", "modeling.py")
FETCH = (
    "import sys; from penstock.workers.weights.hub import resolve_model\n"
    "print(resolve_model(sys.argv[1]))"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint as it is published, with much that nobody here needs."""
    folder = tmp_path / "published"
    shutil.copytree(make_checkpoint("llama"), folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in UNWANTED:
        (folder / name).write_bytes(b"junk")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"junk")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(org__tiny=Repository.of(checkpoint)) as hub:
        use_hub(monkeypatch, hub.url, cache)
        yield hub


def _change_config(hub: Hub, **fields: object) -> None:
    (files,) = hub.repositories[NAME].commits.values()
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **fields}).encode()


def _large(hub: Hub) -> bytes:
    """Give the repository weights that are not read in one piece, and return them."""
    (files,) = hub.repositories[NAME].commits.values()
    files["model.safetensors"] = os.urandom(1 << 20) * (LARGE >> 20)
    return files["model.safetensors"]


def _large_part(folder: Path) -> Path | None:
    """The only file that is not whole, once it is the one that a hub holds up half-way."""
    parts = list(folder.glob("blobs/*.incomplete"))
    with contextlib.suppress(FileNotFoundError):  # it has become whole
        if len(parts) == 1 and parts[0].stat().st_size >= LARGE // 4:
            return parts[0]
    return None


def test_configuration_and_tokenizer_come_first_and_nothing_that_is_not_needed(hub):
    folder = resolve_model(NAME, report=lambda _: None)
    fetched = hub.fetched()
    assert sorted(fetched[:4]) == TEXT and fetched[4:] == ["model.safetensors"]
    (commit,) = hub.repositories[NAME].commits
    assert folder.name == commit == commit_of(NAME, None)
    assert sorted(path.name for path in folder.iterdir()) == sorted(fetched)


def test_how_embeddings_are_pooled_comes_with_the_weights(hub):
    (files,) = hub.repositories[NAME].commits.values()
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in (
        ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    )]  # fmt: skip
    files["modules.json"] = json.dumps(modules).encode()
    files["1_Pooling/config.json"] = b'{"pooling_mode_mean_tokens": true}'
    folder = resolve_model(NAME, report=lambda _: None)
    assert read_pooling(folder, "auto") == Pooling(MEAN)


def test_an_ingress_fetches_no_weights(hub):
    config = EngineConfig(model=NAME)
    folder, tokenizer = verified_text(config)
    assert sorted(hub.fetched()) == TEXT == sorted(path.name for path in folder.iterdir())
    whole = verified_folder(config)
    assert hub.fetched()[4:] == ["model.safetensors"]
    assert model_digest(whole).partition("-")[0] == tokenizer


def test_only_the_tokenizer_of_a_pinned_model_is_compared_without_weights(hub):
    pinned = model_digest(resolve_model(NAME))
    tokenizer, _, weights = pinned.partition("-")
    folder, found = verified_text(EngineConfig(model=NAME, model_digest=pinned))
    assert found == tokenizer
    other = f"{tokenizer[::-1]}-{weights}"
    with pytest.raises(LoadError, match=f"have the digest {tokenizer}, and {tokenizer[::-1]} is"):
        verified_text(EngineConfig(model=NAME, model_digest=other))
    other = f"{tokenizer}-{weights[::-1]}"
    assert verified_text(EngineConfig(model=NAME, model_digest=other)) == (folder, tokenizer)
    with pytest.raises(LoadError, match="restore the files that were meant"):
        verified_folder(EngineConfig(model=NAME, model_digest=other))


def test_a_commit_that_is_here_is_asked_for_no_more(hub):
    commit = commit_of(NAME, None)
    first = resolve_model(NAME, commit)
    hub.requests.clear()
    assert resolve_model(NAME, commit) == first == resolve_model(NAME, commit, text_only=True)
    assert commit_of(NAME, commit) == commit
    assert hub.requests == []


@pytest.mark.parametrize("text_only", [False, True])
def test_an_unsupported_architecture_is_named_before_any_weight_is_fetched(hub, text_only):
    _change_config(hub, architectures=["MambaForCausalLM"], model_type="mamba")
    if text_only:  # the caller looks at it
        assert resolve_model(NAME, text_only=True).name
    else:
        with pytest.raises(ConfigError, match=r"'MambaForCausalLM' is not supported; .*Llama"):
            resolve_model(NAME)
    assert sorted(hub.fetched()) == TEXT


def test_a_repository_that_cannot_be_served_is_said_to_be_what_it_is(hub):
    (files,) = hub.repositories[NAME].commits.values()
    del files["model.safetensors"], files["consolidated.safetensors"]
    del files["original/model.safetensors"]
    with pytest.raises(LoadError, match=r"only pickled weights \(pytorch_model.bin\)"):
        resolve_model(NAME)
    assert sorted(hub.fetched()) == TEXT


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("a.Q4_0.gguf", "a.Q8_0.gguf"), r"has 2 GGUF files; name one of them, as org/x:a.Q4_0"),
        (
            ("adapter_config.json", "adapter_model.safetensors"),
            "adapter: serve its base model with --enable-lora",
        ),
        (("model_index.json",), "has no config.json, so it is no language model"),
    ],
)
def test_a_repository_without_a_checkpoint_is_said_to_be_what_it_is(hub, tmp_path, files, words):
    folder = tmp_path / "other"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"{}")
    hub.repositories["org/x"] = Repository.of(folder)
    for text_only in (False, True):
        with pytest.raises(LoadError, match=words):
            resolve_model("org/x", text_only=text_only)
    assert set(hub.fetched()) <= {"adapter_config.json", "model_index.json"}


class TestRefusals:
    """Each names the remedy, from the commit as from the files, and no weight is fetched."""

    @pytest.fixture(params=["commit", "files", "text"])
    def ask(self, request):
        def ask(name: str, revision: str | None = None) -> object:
            if request.param == "commit":
                return commit_of(name, revision)
            return resolve_model(name, revision, text_only=request.param == "text")

        return ask

    def test_a_missing_model(self, hub, ask):
        with pytest.raises(
            LoadError, match=r"the hub has no model org/none, or it is private: .*HF"
        ):
            ask("org/none")

    @pytest.mark.parametrize("revision", ["v9", "0" * 40])
    def test_a_missing_revision(self, hub, ask, revision, request):
        if revision == "0" * 40 and "commit" in request.node.callspec.id:
            assert ask(NAME, revision) == revision  # nobody is asked
            return
        with pytest.raises(LoadError, match=f"has no revision '{revision}' of {NAME}; give a"):
            ask(NAME, revision)
        with pytest.raises(LoadError, match=f"has no revision '{revision}' of {NAME}; give a"):
            ask(f"{NAME}@{revision}")

    def test_a_hub_that_is_down(self, hub, ask, monkeypatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        hub.status = 404  # of a server that is no hub
        with pytest.raises(LoadError):
            ask(NAME)
        hub.status = 501
        with pytest.raises(HubUnreachable, match="answers with status 501; try again later"):
            ask(NAME)

    def test_no_network(self, hub, ask, monkeypatch, cache):
        url = f"http://127.0.0.1:{free_port()}"
        use_hub(monkeypatch, url, cache)
        with pytest.raises(HubUnreachable, match=f"{url} cannot be reached .*HTTPS_PROXY"):
            ask(NAME)

    def test_a_client_that_must_not_ask(self, hub, ask, monkeypatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set, and its files are not"):
            ask(NAME)
        assert hub.requests == []


def test_a_restricted_model_needs_a_token_which_is_in_no_log(hub, monkeypatch, caplog):
    repository = hub.repositories[NAME]
    repository.token, repository.is_gated = "hf_sesame0123", True
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    commit = commit_of(NAME, None)
    words = rf"access to it is restricted; accept its conditions at {hub.url}/{NAME}, .*HF_TOKEN"
    with pytest.raises(LoadError, match=words):
        resolve_model(NAME, commit)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong4567")
    with pytest.raises(LoadError, match=words) as refused:
        resolve_model(NAME, commit)
    assert hub.ranges == []  # no file was sent
    monkeypatch.setenv("HF_TOKEN", "hf_sesame0123")
    assert resolve_model(NAME, commit).name == commit
    assert "Bearer hf_sesame0123" in hub.tokens
    assert caplog.text and "sesame" not in caplog.text and "wrong4567" not in caplog.text
    assert "wrong4567" not in str(refused.value)


def test_the_space_is_looked_at_before_anything_is_fetched(hub, cache):
    hub.repositories[NAME].sizes["model.safetensors"] = 1 << 50
    with pytest.raises(
        LoadError, match=rf"1048576.0 GiB .* downloaded to {cache}, which has .* free"
    ):
        resolve_model(NAME)
    assert sorted(hub.fetched()) == TEXT
    left = cache / "models--org--tiny" / "blobs" / "x.0.incomplete"
    left.write_bytes(b"x" * 100)
    with pytest.raises(LoadError, match=r"unfinished downloads take 100 bytes: .*--download-dir"):
        resolve_model(NAME)


def test_a_folder_that_cannot_be_written_is_named(hub, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LoadError, match=rf"{file}/hub cannot be written; .*--download-dir"):
        resolve_model(NAME, None, str(file / "hub"))


def test_download_dir_is_where_files_go(hub, cache, tmp_path):
    there = tmp_path / "models"
    config = EngineConfig(model=NAME, download_dir=str(there))
    for folder in (verified_text(config)[0], verified_folder(config)):
        assert folder.is_relative_to(there)
    assert not list(cache.glob("models*"))


def test_a_revision_behind_the_name_is_the_setting(hub, checkpoint):
    (first,) = hub.repositories[NAME].commits
    (checkpoint / "tokenizer.json").write_text('{"version": 2}')
    second = Repository.of(checkpoint)
    hub.repositories[NAME].commits |= second.commits
    hub.repositories[NAME].refs = {"main": second.refs["main"], "v1": first}
    assert commit_of(NAME, None) == second.refs["main"] != first
    for name, revision in ((f"{NAME}@v1", None), (NAME, "v1"), (f"{NAME}@v1", "v1")):
        assert commit_of(name, revision) == first == resolve_model(name, revision).name
    with pytest.raises(ConfigError, match=r"org/tiny@v1 names the revision v1, and revision is v2"):
        EngineConfig(model=f"{NAME}@v1", revision="v2")


def test_an_interrupted_answer_is_continued_where_it_ended(hub):
    content = _large(hub)
    hub.cut_after = 15 << 20
    reports: list[Progress] = []
    folder = resolve_model(NAME, report=reports.append)
    assert (folder / "model.safetensors").read_bytes() == content
    assert [each for each in hub.ranges if each] == [f"bytes={10 << 20}-"]
    assert {each.phase for each in reports} == {DOWNLOADING}
    done = [each.done for each in reports]
    assert done == sorted(done) and done[0] == 0 and done[-1] == LARGE
    assert {each.total for each in reports} == {LARGE}
    assert any(0 < each.percent < 100 for each in reports)


def test_a_killed_download_keeps_the_files_that_are_whole(hub, tmp_path):
    content = _large(hub)
    (files,) = hub.repositories[NAME].commits.values()
    files["a.safetensors"] = b"whole"
    hub.is_free.clear()  # the other file is small enough to be sent before anything is held
    killed = process(hub, tmp_path / "home", FETCH, NAME)
    folder = tmp_path / "home" / "hub" / "models--org--tiny"
    deadline_s = time.monotonic() + 100
    while not (list(folder.glob("snapshots/*/a.safetensors")) and _large_part(folder)):
        assert killed.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (left,) = folder.glob("blobs/*.incomplete")
    (folder / "blobs" / "another.0.incomplete").write_bytes(b"of a process that never locked")
    hub.requests.clear()
    hub.is_free.set()
    again = process(hub, tmp_path / "home", FETCH, NAME)
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert (Path(out.strip()) / "model.safetensors").read_bytes() == content
    assert hub.fetched() == ["model.safetensors"]
    assert not left.exists()
    assert [path.name for path in folder.glob("blobs/*.incomplete")] == ["another.0.incomplete"]


def test_what_another_process_writes_is_not_removed(hub, tmp_path):
    _large(hub)
    hub.is_free.clear()
    writes = process(hub, tmp_path / "home", FETCH, NAME)
    cache = tmp_path / "home" / "hub"
    while "model.safetensors" not in hub.fetched():
        assert writes.poll() is None
        time.sleep(0.01)
    folder = cache / "models--org--tiny"
    while (part := _large_part(folder)) is None:
        assert writes.poll() is None
        time.sleep(0.01)
    remove_leftovers(cache, folder.name)
    assert list(folder.glob("blobs/*.incomplete")) == [part]
    hub.is_free.set()
    out, err = writes.communicate(timeout=200)
    assert writes.returncode == 0, err
    remove_leftovers(cache, folder.name)
    assert (Path(out.strip()) / "model.safetensors").stat().st_size == LARGE


def test_two_processes_of_a_machine_fetch_each_file_once(hub, tmp_path):
    content = _large(hub)
    hub.is_free.clear()
    code = (
        "import sys; from penstock.workers.weights.hub import resolve_model\n"
        "print(resolve_model(sys.argv[1], report=lambda each: print(each.phase, flush=True)))"
    )
    both = [process(hub, tmp_path / "home", code, NAME) for _ in range(2)]
    firsts = [each.stdout.readline().strip() for each in both if each.stdout is not None]
    assert sorted(firsts) == [DOWNLOADING, WAITING]
    hub.is_free.set()
    outs = [each.communicate(timeout=200) for each in both]
    assert [each.returncode for each in both] == [0, 0], outs
    assert DOWNLOADING not in outs[firsts.index(WAITING)][0]
    (folder,) = {out.splitlines()[-1] for out, _ in outs}
    assert (Path(folder) / "model.safetensors").read_bytes() == content
    assert hub.fetched().count("model.safetensors") == 1


def test_files_that_are_here_suffice_without_a_network(hub, monkeypatch, cache, caplog):
    folder = resolve_model(NAME)
    use_hub(monkeypatch, f"http://127.0.0.1:{free_port()}", cache)
    assert commit_of(NAME, None) == folder.name
    (warning,) = [each for each in caplog.records if each.name == "penstock.worker"]
    assert f"this is {folder.name}, which is on this machine" in warning.message
    caplog.clear()
    with pytest.raises(HubUnreachable):  # the error says it all
        commit_of("org/nowhere", None)
    assert not [each for each in caplog.records if each.name == "penstock.worker"]
    assert resolve_model(NAME) == folder == resolve_model(NAME, text_only=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert commit_of(NAME, None) == folder.name
    assert resolve_model(NAME) == folder


def test_a_tokenizer_that_is_here_names_the_commit_without_a_network(hub, monkeypatch, cache):
    folder = resolve_model(NAME, text_only=True)
    use_hub(monkeypatch, f"http://127.0.0.1:{free_port()}", cache)
    assert commit_of(NAME, None) == folder.name
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set, and its files are not all on"):
        resolve_model(NAME)
