"""A list of models in the configuration: what each has, what all share, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from penstock.deployments import app
from penstock.deployments.cli.main import main
from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.config_file import as_yaml, read_config
from penstock.deployments.config_values import settings_that_differ, values_by_group
from penstock.deployments.gate.types import digest_of
from penstock.deployments.placement import ClusterResources, Node, resolve_each
from penstock.deployments.preflight import check_before_start
from penstock.workers.errors import ConfigError
from tests.deployments.ports import free_port

TWO = """\
http-port: 9000
max_num_seqs: 32
api_keys_file: keys
models:
  - model: org/large
    served-model-name: [large, gpt-4o, "*"]
    num-workers: 1:8
    device: cuda
  - model: builtin
    max_num_seqs: 8
    max_model_len: 1k
    admission: optimistic
"""


def two(tmp_path: Path, text: str = TWO) -> ServeConfig:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return config_from(read_config(str(file)))


def entries(*models: dict[str, Any], **shared: Any) -> ServeConfig:
    return config_from({"models": list(models), **shared})


def test_each_model_has_its_settings_over_those_above_the_list(tmp_path: Path) -> None:
    config = two(tmp_path)
    large, small = config.models
    assert config.each_model == (large, small)
    assert (large.model_name, large.other_names) == ("large", ("gpt-4o", "*"))
    assert (large.engine.model, large.num_workers, large.engine.max_num_seqs) == (
        *("org/large", "1:8", 32),
    )
    assert (small.model_name, small.engine.max_num_seqs, small.engine.max_model_len) == (
        *("builtin", 8, 1000),
    )
    assert (large.admission, small.admission) == ("predicted", "optimistic")
    for each in (config, large, small):
        assert (each.http_port, each.api_keys_file) == (9000, "keys")
    assert [each.worker_deployment for each in config.models] == ["Worker-large", "Worker-builtin"]
    assert [each.gate_scope for each in config.models] == ["penstock:large", "penstock:builtin"]


def test_a_list_of_one_is_the_model_alone() -> None:
    alone = {"model": "builtin", "served_model_name": ("a", "b"), "num_workers": 2}
    assert entries(alone, http_port=9000) == config_from({**alone, "http_port": 9000})
    config = entries(alone)
    assert not config.models and config.each_model == (config,)
    assert (config.worker_deployment, config.gate_scope) == ("Worker", "penstock")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"models": []}, "models must be a list of models"),
        ({"models": {"model": "a/b"}}, "models must be a list of models"),
        ({"models": "a/b"}, "models must be a list of models"),
        ({"models": ["a/b"]}, r"models\[0\] must have settings"),
        ({"models": [{1: 2}]}, r"models\[0\] must have settings"),
        ({"models": [{"num_workers": 1}]}, r"models\[0\]\.model is missing"),
        ({"models": [{"model": "a/b"}], "model": "c/d"}, "^model: each entry of models has"),
        (
            {"models": [{"model": "a/b"}], "served_model_name": "x"},
            "^served_model_name: each entry of models has",
        ),
        (
            {"models": [{"model": "a/b"}, {"model": "c/d", "http_port": 1}]},
            r"models\[1\]\.http_port: all models share this setting",
        ),
        (
            {"models": [{"model": "a/b"}, {"model": "c/d", "num_workers": 0}]},
            r"models\[1\]\.num_workers must be at least 1",
        ),
        ({"models": [{"model": "a/b"}], "num_workers": 0}, "^num_workers must be at least 1"),
        (
            {"models": [{"model": "a/b", "modle": 1}]},
            r"models\[0\]: unknown setting 'modle'; did you mean 'model'",
        ),
        ({"models": [{"model": "a/b"}], "htp_port": 1}, "^unknown setting 'htp_port'"),
        (
            {"models": [{"model": "a/b"}, {"model": "c/b"}]},
            r"models\[1\]\.served_model_name: models\[0\] is served as 'b' already",
        ),
        (
            {
                "models": [
                    {"model": "a/b", "served_model_name": ["x", "*"]},
                    {"model": "c/d", "served_model_name": ["y", "*"]},
                ]
            },
            r"models\[1\]\.served_model_name: models\[0\] is served as any name \(\*\) already",
        ),
        (
            {
                "models": [
                    {"model": "a/b", "served_model_name": "x/y"},
                    {"model": "a/c", "served_model_name": "x y"},
                ]
            },
            r"models\[1\]\.served_model_name: 'x y' and 'x/y' of models\[0\] differ in special",
        ),
        (
            {
                "models": [
                    {"model": "a/b", "predictor_file": "f"},
                    {"model": "c/d", "predictor_file": "f"},
                ]
            },
            r"models\[1\]\.predictor_file: models\[0\] has the same file",
        ),
        (
            {
                "models": [
                    {"model": "a/b", "compute_cores": "0-1"},
                    {"model": "c/d", "compute_cores": "1-2"},
                ]
            },
            r"models\[1\]\.compute_cores: models\[0\] has cores 1, too",
        ),
    ],
)
def test_errors_name_the_entry(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        config_from(given)


def test_what_is_checked_before_the_start_names_the_entry(tmp_path: Path) -> None:
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    check_before_start(entries({"model": "builtin"}, {"model": "builtin-moe"}, **ports))
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"^models\[1\]\.model '.*nothing' not found"):
        check_before_start(entries({"model": "builtin"}, {"model": missing}, **ports))
    with pytest.raises(ConfigError, match=r"^models\[0\]\.compute_cores 4000 must be among"):
        check_before_start(
            entries({"model": "builtin", "compute_cores": "4000"}, {"model": "builtin-moe"})
        )


def test_what_differs_and_what_is_dumped_make_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = two(tmp_path)
    arguments = settings_that_differ(config)
    assert {*arguments} == {"http_port", "api_keys_file", "models"}
    assert config_from(arguments).models == config.models
    dumped = as_yaml(values_by_group(config))
    again = tmp_path / "again.yaml"
    again.write_text(dumped)
    assert config_from(read_config(str(again))).models == config.models
    assert as_yaml(values_by_group(config_from(read_config(str(again))))) == dumped
    given = ["serve", "--config", str(tmp_path / "models.yaml"), "--grpc-port", "9001"]
    assert main([*given, "--dump-config"]) == 0
    assert capsys.readouterr().out == dumped.replace("grpc_port: 8001", "grpc_port: 9001")


def test_flags_stand_above_the_list_and_vllms_names_may_be_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n- model: builtin\n  kv-cache-dtype: fp8\n- model: builtin-moe\n  threads: 1\n"
    )
    serve = ["serve", "--config", str(file), "--dump-config"]
    assert main([*serve, "--threads", "2"]) == 0
    file.write_text(capsys.readouterr().out)
    first, second = config_from(read_config(str(file))).models
    assert (first.engine.kv, first.engine.threads, second.engine.threads) == ("fp8", 2, 1)
    assert main([*serve[:1], "org/name", *serve[1:]]) == 2
    assert "model: each entry of models has its own" in capsys.readouterr().err


def test_paths_are_those_of_the_process_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    config = entries({"model": "./a", "predictor_file": "p"}, {"model": "builtin"}, data_dir="d")
    first, second = config.with_absolute_paths().models
    assert second.predictor_file == "auto"
    assert (first.engine.model, second.engine.model) == (str(tmp_path / "a"), "builtin")
    assert first.predictor_file == str(tmp_path / "p")
    assert second.data_dir == str(tmp_path / "d")


def test_workers_on_cpus_share_them_equally_whichever_model_they_have() -> None:
    config = entries(
        *({"model": "builtin", "num_workers": 3}, {"model": "builtin-moe"}, {"model": "a/b"}),
        device="cpu",
    )
    machine = ClusterResources((Node(num_cpus=10),))
    found = resolve_each(config, machine)
    assert [each.worker.num_cpus for each in found] == [2.0, 2.0, 2.0]
    assert [each.config.engine.threads for each in found] == [2, 2, 2]
    mixed = entries({"model": "builtin", "device": "cpu"}, {"model": "a/b", "device": "cuda"})
    on_cpu, on_gpu = resolve_each(mixed, machine)
    assert (on_cpu.worker.num_cpus, on_cpu.worker.num_gpus) == (10.0, 0)
    assert on_gpu.worker.num_gpus == 1


def test_serve_gets_a_deployment_for_each(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    config = two(tmp_path)
    described = app.application(config, None)
    names = [each["name"] for each in described["deployments"]]
    assert names == ["Worker-large", "Worker-builtin", "Ingress"]
    scaled, fixed, _ = described["deployments"]
    policy = scaled["autoscaling_config"]["policy"]["policy_kwargs"]
    assert (policy["app_name"], policy["gate_scope"]) == ("penstock", "penstock:large")
    assert fixed["num_replicas"] == 1
    ServeDeploySchema.model_validate({"applications": [described]})
    built = config_from(described["args"])  # as build_app reads it: without numbers of replicas
    assert [each.num_workers for each in built.models] == [1, 1]
    assert built.models[0].engine == config.models[0].engine
    wired = app.build_app(described["args"])
    assert wired is not None


def test_gates_of_several_models_have_one_digest_of_their_settings() -> None:
    def digest(**of_first: Any) -> str:
        config = entries({"model": "builtin", **of_first}, {"model": "builtin-moe"})
        return digest_of([app.gate_setup(each, None) for each in config.models])

    assert digest() == digest()
    assert digest() != digest(max_queued=7)
    alone = app.gate_setup(ServeConfig(), None)
    assert alone is not None and digest_of([alone]) == alone.digest
    assert alone.snapshot_key == "predictor/penstock"
    assert digest_of([None, None]) == ""
