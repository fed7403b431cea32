"""What is known of a model of the hub before it is served, and that it is pinned to a commit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.deployments.cli.main import main
from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.hub_model import look_at, pinned
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.hub_errors import HubUnreachable
from tests.deployments.ports import free_port
from tests.hub.client import use_hub
from tests.hub.server import Hub, Repository, running_hub

NAME = "org/name"
TEXT = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = Path(shutil.copytree(resolve_model("builtin"), tmp_path / "published"))
    with running_hub(org__name=Repository.of(folder, v1=0)) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def _config(**values: Any) -> ServeConfig:
    return config_from({"model": NAME, **values})


def _commit(hub: Hub) -> str:
    return hub.repositories[NAME].refs["main"]


@pytest.mark.parametrize("model", [NAME, f"{NAME}@v1"])
def test_it_is_pinned_and_measured_and_no_weight_is_fetched(hub, model, tmp_path):
    found = look_at(_config(model=model))
    assert found is not None
    engine = found.config.engine
    assert (engine.model, engine.revision) == (NAME, _commit(hub))
    assert found.config.model_name == "name"
    weights = hub.repositories[NAME].commits[_commit(hub)]["model.safetensors"]
    assert found.num_missing_bytes == len(weights)
    assert str(found) == (
        f"{NAME} is at commit {_commit(hub)}; 9.6 MiB to download to {tmp_path / 'cache'}"
    )
    assert sorted(hub.fetched()) == [*TEXT, "tokenizer_config.json"]
    assert pinned(found.config) == found.config
    resolve_model(engine.model, engine.revision)
    again = look_at(_config(model=model))
    assert again is not None and again.num_missing_bytes == 0
    assert str(again).endswith(f"; its files are in {tmp_path / 'cache'}")


def test_models_from_elsewhere_are_nobodys_business(hub, tmp_path):
    for model in ("builtin", str(tmp_path)):
        assert look_at(_config(model=model)) is None
        assert pinned(_config(model=model)) == _config(model=model)
    assert hub.requests == []


def test_a_cluster_may_reach_a_hub_that_this_machine_does_not(hub, monkeypatch, tmp_path):
    use_hub(monkeypatch, f"http://127.0.0.1:{free_port()}", tmp_path / "cache")
    far = _config(ray_address="auto")
    assert look_at(far) is None and pinned(far) == far
    with pytest.raises(HubUnreachable, match="cannot be reached"):
        look_at(_config())


def test_a_folder_of_the_clusters_machines_is_not_made_here(hub, tmp_path):
    there = tmp_path / "there"
    found = look_at(_config(ray_address="auto", download_dir=str(there)))
    assert found is not None and found.config.engine.download_dir == str(there)
    assert not there.exists()


def test_space_is_a_matter_of_the_machine_that_loads(hub):
    hub.repositories[NAME].sizes["model.safetensors"] = 1 << 50
    with pytest.raises(LoadError, match="to be downloaded"):
        look_at(_config())
    assert look_at(_config(ray_address="auto")) is not None


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            [],
            "'MambaForCausalLM' is not supported; supported are LlamaForCausalLM,",
        ),
        ({"quantization_config": {"quant_method": "fp7"}}, [], "fp7"),
        ({}, ["--moe-mode", "sparse", "--expert-cache-gb", "1", "--weights", "nf4"], "moe_mode"),
        ({}, ["--default-chat-template-kwargs", '{"x": 1}'], "kwargs.x: the chat template has no"),
        ({}, ["--revision", "v9"], f"the hub has no revision 'v9' of {NAME}"),
        ({}, ["--model-digest", "a-b"], "restore the files that were meant"),
    ],
)
def test_serve_says_what_is_wrong_before_ray_starts(hub, capsys, change, arguments, words):
    files = hub.repositories[NAME].commits[_commit(hub)]
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **change}).encode()
    ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
    assert main(["serve", NAME, *ports, *arguments]) in (1, 2)
    said = capsys.readouterr()
    assert words in said.err and "starting Ray" not in said.out
    assert "model.safetensors" not in hub.fetched()


def test_two_revisions_are_refused():
    with pytest.raises(ConfigError, match="names the revision v1, and revision is v2"):
        _config(model=f"{NAME}@v1", revision="v2")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/Name-GGUF:Q4_K_M", "Name-GGUF:Q4_K_M"),
        ("org/x@v1:sub/Name.Q8_0.gguf", "Name.Q8_0"),
        ("org/name@v1", "name"),
        ("./no/folder.gguf", "folder"),
    ],
)
def test_the_name_for_clients_has_no_revision(model, name):
    assert config_from({"model": model}).model_name == name
