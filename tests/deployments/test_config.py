"""One flat namespace of settings: from YAML and from flags, with errors that name the remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.serve.schema import ServeDeploySchema

import penstock.deployments
from penstock.deployments.app import build_app
from penstock.deployments.config import ServeConfig, config_from, settings, settings_by_group
from penstock.deployments.config_file import read_config
from penstock.deployments.config_values import settings_that_differ
from penstock.deployments.preflight import check_before_start, check_cores, check_model
from penstock.deployments.security.key_file import read_key_file
from penstock.deployments.security.records import record_from
from penstock.workers.config import ContextOptions, EngineConfig, KvOptions
from penstock.workers.errors import ConfigError
from tests.deployments.ports import free_port
from tests.workers.gguf_files import file_of, pair, text

ROOT = Path(penstock.deployments.__file__).parent


def test_settings_are_the_fields_of_both_dataclasses_and_names_are_unique():
    names = [setting.name for setting in settings()]
    fields = [f.name for owner in (ServeConfig, EngineConfig) for f in dataclasses.fields(owner)]
    assert sorted(names) == sorted(set(fields) - {"engine", "models", "key"})
    assert len(names) == len(set(names))
    assert all(setting.help for setting in settings())


def test_defaults_are_those_of_the_dataclasses():
    assert config_from({}) == ServeConfig()


def test_values_reach_their_owner():
    config = config_from({"num_workers": 3, "block_size": 32, "model": "org/name"})
    assert (config.num_workers, config.engine.block_size) == (3, 32)
    assert config.engine.model == "org/name"
    assert config.model_name == "name"


@pytest.mark.parametrize(
    ("text", "number"),
    [("25.6k", 25600), ("2M", 2_000_000), ("1Ki", 1024), ("4096", 4096), ("1_000", 1000), (7, 7)],
)
def test_numbers_as_people_write_them(text, number):
    assert config_from({"max_model_len": text}).engine.max_model_len == number


@pytest.mark.parametrize(
    ("text", "gib"),
    [("4", 4), ("0.5", 0.5), ("4GB", 4), ("4 GiB", 4), ("4G", 4), ("512MB", 0.5), (2, 2)],
)
def test_memory_as_people_write_it(text, gib):
    assert config_from({"kv_cache_gb": text}).engine.kv_cache_gb == gib
    assert config_from({"max_open_mb": "1GB"}).max_open_mb == 1024
    assert config_from({"max_open_mb": "64M"}).max_open_mb == 64


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"engine": 8}, ["'engine'; docs/reference/settings.md"]),
        ({"kv_cache_gb": "lots"}, ["kv_cache_gb", "GiB", "4GB"]),
        ({"kv_cache_gb": "5M"}, ["kv_cache_gb", "5M"]),
        ({"max_open_mb": "100kB"}, ["max_open_mb", "MiB"]),
        ({"blocksize": 8}, ["'blocksize'", "'block_size'"]),
        ({"num_worker": 8}, ["'num_worker'", "'num_workers'"]),
        ({"num_workers": "many"}, ["num_workers", "whole number"]),
        ({"num_workers": 1.5}, ["num_workers", "whole number"]),
        ({"num_workers": True}, ["num_workers", "whole number"]),
        ({"num_workers": 0}, ["num_workers", "at least 1"]),
        ({"num_workers": None}, ["num_workers", "needs a value", "whole number, at least 1"]),
        ({"grpc_port": "none"}, ["grpc_port", "needs a value", "in 1 ... 65535"]),
        ({"kv": "none"}, ["kv needs a value", "one of auto, int8, fp8"]),
        ({"num_workers": "0:0"}, ["num_workers", "at least 1"]),
        ({"num_workers": "3:2"}, ["num_workers", "MIN", "3:2"]),
        ({"num_workers": "1:2:3"}, ["num_workers", "MIN:MAX"]),
        ({"num_workers": "1:8", "admission": "optimistic"}, ["num_workers", "--admission"]),
        ({"num_ingress": "0:2"}, ["num_ingress", "at least 1"]),
        ({"prefix_cache": "perhaps"}, ["prefix_cache", "true or false"]),
        ({"host": ["a"]}, ["host", "text"]),
        ({"weights": "int3"}, ["weights", "bf16"]),
        ({"http_port": 70000}, ["http_port", "65535"]),
        ({"http_port": 9, "grpc_port": 9}, ["http_port", "grpc_port"]),
        ({"metrics_port": 70000}, ["metrics_port", "65535"]),
        ({"metrics_port": 8001}, ["metrics_port", "differ"]),
        ({"block_size": 24}, ["block_size", "power of two"]),
        ({"compute_cores": "some"}, ["compute_cores", "2-7,9"]),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(values, words):
    with pytest.raises(ConfigError) as error:
        config_from(values)
    for word in words:
        assert word in str(error.value)


def test_yaml_file(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("model: builtin\nnum-workers: 2\nmax_model_len: 1.5k\nprefix_cache: false\n")
    config = config_from(read_config(str(file)))
    assert config.num_workers == 2
    assert config.engine.max_model_len == 1500
    assert not config.engine.prefix_cache


@pytest.mark.parametrize(
    ("value", "expected"), [(3, (3, 3)), ("3", (3, 3)), ("1:8", (1, 8)), ("0:4", (0, 4))]
)
def test_a_number_of_replicas_is_fixed_or_a_range(value, expected):
    config = config_from({"num_workers": value})
    assert (config.min_workers, config.max_workers) == expected
    assert config.is_autoscaled == (expected[0] != expected[1])


@pytest.mark.parametrize("text", ["1:8", '"1:8"', "0:4", "10:59"])
def test_a_range_in_yaml_is_no_number_of_base_60(tmp_path, text):
    file = tmp_path / "penstock.yaml"
    file.write_text(f"num_workers: {text}\n")
    assert config_from(read_config(str(file))).num_workers == text.strip('"')


def test_the_settings_that_differ_make_the_same_configuration():
    config = config_from({"num_workers": "1:8", "kv": "int8", "block_size": 32, "host": "::1"})
    differing = settings_that_differ(config)
    assert differing == {"num_workers": "1:8", "kv": "int8", "block_size": 32, "host": "::1"}
    assert config_from(differing) == config


def test_on_and_off_are_words_though_yaml_reads_them_otherwise(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("async_scheduling: on\ncuda_graphs: off\n")
    engine = config_from(read_config(str(file))).engine
    assert (engine.async_scheduling, engine.cuda_graphs) == ("on", "off")
    with pytest.raises(ConfigError, match="kv_commit must be text"):
        config_from({"kv_commit": True})


def test_a_setting_that_is_json_may_be_a_mapping_of_the_file(tmp_path):
    file = tmp_path / "penstock.yaml"
    given = {"enable_thinking": False, "effort": "low", "depth": 3}
    block = "default-chat-template-kwargs:\n  enable_thinking: off\n  effort: low\n  depth: 3\n"
    as_text = f"default_chat_template_kwargs: '{json.dumps(given)}'\n"
    for content in (block, as_text):
        file.write_text(content)
        engine = config_from(read_config(str(file))).engine
        assert json.loads(engine.default_chat_template_kwargs or "") == given
    file.write_text(
        "models:\n  - model: org/name\n  - model: builtin\n"
        "    default_chat_template_kwargs: {enable_thinking: no, effort: low, depth: 3}\n"
    )
    engine = config_from(read_config(str(file))).models[1].engine
    assert json.loads(engine.default_chat_template_kwargs or "") == given


def test_settings_have_no_sections(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("engine:\n  kv: int8\n")
    with pytest.raises(ConfigError, match=r"^engine: settings have no sections; write those below"):
        config_from(read_config(str(file)))
    file.write_text("kv:\n  format: int8\n")
    with pytest.raises(ConfigError, match=r"^kv must be text"):  # a setting is no section
        config_from(read_config(str(file)))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "3: x\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"penstock\.yaml"):
        read_config(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\nmodel: b\n", "model is given twice, in lines 1 and 2"),
        ("http-port: 1\nmodel: b\nhttp_port: 2\n", "http_port is given twice, in lines 1 and 3"),
        ("models:\n  - model: a\n    weights: int8\n    weights: int4\n", "weights is given twice"),
    ],
)
def test_a_name_that_comes_twice_is_refused(tmp_path, text, words):
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(str(file))


def test_a_gguf_file_is_a_model_by_its_own_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "Some-1B.Q8_0.gguf"
    config = config_from({"model": f"./{file.name}"})
    with pytest.raises(ConfigError, match="not found"):
        check_model(config.engine.model)
    file.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ConfigError, match=r"Some-1B\.Q8_0\.gguf: the number of tensors needs 8"):
        check_model(config.engine.model)
    name = pair("general.architecture", 8, text("mamba"))
    file.write_bytes(file_of([name], [], b""))
    with pytest.raises(ConfigError, match=r"architecture 'mamba' .*supported are llama, qwen2"):
        check_model(config.engine.model)
    assert config.model_name == "Some-1B.Q8_0"
    assert config.with_absolute_paths().engine.model == str(file)


def test_models_are_looked_up_before_anything_starts(tmp_path):
    for model in ("builtin", "builtin-moe", "org/name-7B.v2"):
        check_model(model)
    with pytest.raises(ConfigError, match="not found"):
        check_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="hub id"):
        check_model("qwen")
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_model(str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"BertModel.*LlamaForCausalLM"):
        check_model(str(tmp_path))
    file.write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 9, '
        '"max_position_embeddings": 64}'
    )
    check_model(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        check_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("model", "limit"), [("builtin", 2048), ("builtin-moe", 2048)])
def test_a_length_beyond_the_models_positions_is_refused(model, limit):
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    check_before_start(config_from({"model": model, "max_model_len": str(limit), **ports}))
    with pytest.raises(ConfigError, match=r"max_model_len 2,049 exceeds the 2,048 tokens"):
        check_before_start(config_from({"model": model, "max_model_len": str(limit + 1), **ports}))


def test_a_port_in_use_is_named_with_the_flag_that_moves_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--grpc-port"):
            check_before_start(ServeConfig(http_port=free_port(), grpc_port=port))
        # An update of a cluster that serves on this machine.
        check_before_start(ServeConfig(http_port=port, grpc_port=port + 1, ray_address="auto"))


def test_a_cluster_that_does_not_answer_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        check_before_start(ServeConfig(ray_address=address))
    with pytest.raises(ConfigError, match=f"ray_address {address}: no Ray cluster.*ray start"):
        check_before_start(ServeConfig(ray_address=address))
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid:6379: no Ray cluster answers"):
        check_before_start(ServeConfig(ray_address="no-such-host.invalid:6379"))


def test_api_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second \n")
    assert read_key_file(str(file)) == (record_from("first"), record_from("second"))
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        read_key_file(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_file(str(tmp_path / "missing"))
    for digest in ("sha256:12", "sha256:" + "x" * 64, "sha256:"):
        file.write_text(f"{digest}\n")
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            read_key_file(str(file))
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_key_file(str(file))


def test_a_file_of_keys_that_every_user_may_write_is_refused(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("first\n")
    file.chmod(0o600)
    assert read_key_file(str(file)) and not caplog.text
    file.chmod(0o644)
    assert read_key_file(str(file)) and "can be read by every user" in caplog.text
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by every user: chmod o-w"):
        read_key_file(str(file))


def test_open_means_reachable_by_strangers():
    assert not ServeConfig().is_open
    assert ServeConfig(host="0.0.0.0").is_open
    assert not ServeConfig(host="0.0.0.0", api_keys_file="keys").is_open


def test_an_open_server_starts_only_if_asked_to():
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0.*--api-keys-file.*--insecure"):
        check_before_start(ServeConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="--insecure"):
        build_app({"host": "10.0.0.1"})  # as `serve deploy` and KubeRay call it
    ServeConfig(host="0.0.0.0", insecure=True).check_access()
    ServeConfig(host="0.0.0.0", api_keys_file="keys").check_access()
    ServeConfig().check_access()


def test_the_serve_config_deploys_what_it_says():
    deploy = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "serve.yaml").read_text()))
    (application,) = deploy.applications
    module, _, name = application.import_path.partition(":")
    assert module == "penstock.deployments.app"
    assert name == "build_app"
    config = config_from(application.args)
    assert {config.http_port, config.grpc_port}.isdisjoint({deploy.http_options.port})


def test_the_cluster_file_is_one_that_ray_up_takes():
    with open(Path(ray.autoscaler.__file__).parent / "ray-schema.json") as file:
        schema = json.load(file)
    cluster = yaml.safe_load((ROOT.resolve().parent / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, None),
        ({"compute_cores": 2}, None),
        ({"compute_cores": "2-3", "num_workers": 2}, None),
        ({"compute_cores": "0-3"}, ["compute_cores 0-3", "0, 1, 2, 3", "leave at least one"]),
        ({"compute_cores": "2,7"}, ["compute_cores 2,7", "0, 1, 2, 3"]),
        ({"compute_cores": "2-3", "threads": 2, "num_workers": 2}, ["2 cores for 4 threads"]),
        ({"compute_cores": "2", "ray_address": "auto"}, ["compute_cores", "existing cluster"]),
    ],
)
def test_cores_are_checked_before_anything_starts(values, words, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    if words is None:
        check_cores(config_from(values))
        return
    with pytest.raises(ConfigError) as error:
        check_cores(config_from(values))
    assert all(word in str(error.value) for word in words), error.value


def test_where_no_thread_can_be_kept_on_a_core(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match=r"compute_cores cannot be reserved.*Linux"):
        check_cores(config_from({"compute_cores": "0"}))


def test_every_group_is_a_part_of_the_configuration_and_its_settings_are_flat():
    config = EngineConfig(kv="int8", sinks=4)
    assert isinstance(config, KvOptions) and isinstance(config, ContextOptions)
    assert (config.kv, config.sinks) == ("int8", 4)
    titles = list(settings_by_group())
    assert titles[0] == "model" and len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1; got 0"),
        ({"kv_cache_gb": 0.0}, "kv_cache_gb must be positive; got 0.0"),
        ({"moe_keep": 1.5}, "moe_keep must lie in (0, 1]; got 1.5"),
        ({"activation_memory": "head"}, "activation_memory must be one of tail, separate"),
    ],
)
def test_an_error_names_the_setting_the_bound_and_the_value(value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**value)
