"""What replicas get of a cluster: CPUs or a GPU, threads, environment; decided without Ray."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.deployments.config import ServeConfig
from penstock.deployments.placement import (
    ClusterResources,
    Node,
    ReplicaResources,
    resolve,
    uses_gpus,
    variables_of_workers,
)
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError

EIGHT = ClusterResources((Node(num_cpus=8),))


def config_of(num_workers=1, **engine):
    return ServeConfig(num_workers=num_workers, engine=EngineConfig(**engine))


def named(name, **engine):
    return dataclasses.replace(config_of(**engine), served_model_name=name, key=name)


@pytest.mark.parametrize(
    ("nodes", "num_workers", "num_cpus", "threads"),
    [
        ((8,), 1, 8, 8),
        ((8,), 3, 2, 2),  # whole CPUs where there are enough
        ((2,), 3, 0.66, 1),  # never more than there are: 3 x 0.66 <= 2
        ((8, 4), 2, 4, 4),  # the smallest node decides
        ((8, 4), 3, 2, 2),  # two workers on one of the nodes
        ((0, 8), 1, 8, 8),  # a head without CPUs carries no worker
        ((), 2, 0.49, 1),
    ],
)
def test_cpu_workers_share_the_cpus_of_the_nodes(nodes, num_workers, num_cpus, threads):
    cluster = ClusterResources(tuple(Node(num_cpus=each) for each in nodes))
    resolved = resolve(config_of(num_workers), cluster)
    assert resolved.worker.num_cpus == pytest.approx(num_cpus)
    assert resolved.config.engine.threads == threads
    assert resolved.worker.num_gpus == 0


def test_a_process_without_a_cluster_plans_for_one_cpu():
    resolved = resolve(config_of(4), None)
    assert (resolved.worker.num_cpus, resolved.config.engine.threads) == (1, 1)


@pytest.mark.parametrize(
    ("engine", "num_workers", "threads"),
    [({"threads": 5}, 1, 5), ({"compute_cores": "0-5"}, 2, 3), ({"compute_cores": "0"}, 2, 1)],
)
def test_threads_as_set_or_one_for_each_reserved_core(engine, num_workers, threads):
    resolved = resolve(config_of(num_workers, **engine), EIGHT)
    assert resolved.config.engine.threads == threads
    assert resolved.worker.env_vars == {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": str(threads)}


def test_the_share_of_a_worker_is_that_of_the_most_workers_unless_it_is_set():
    assert resolve(config_of("1:4"), EIGHT).worker.num_cpus == 2
    resolved = resolve(ServeConfig(num_workers="0:4", cpus_per_worker=3), EIGHT)
    assert (resolved.worker.num_cpus, resolved.config.engine.threads) == (3, 3)


def test_node_types_that_can_be_started_count_before_a_node_is_there():
    head = (Node(),)
    declared = ClusterResources(head, {"CPU": 64.0, "GPU": 8.0})
    assert resolve(config_of("1:8"), declared).worker == ReplicaResources(num_cpus=1, num_gpus=1)
    assert resolve(config_of(device="cuda"), ClusterResources(head)).worker.num_gpus == 1


def test_a_cluster_without_cpus_and_gpus_is_refused_with_the_remedy():
    for cluster in (ClusterResources((Node(),)), ClusterResources((Node(),), {"CPU": 64.0})):
        with pytest.raises(ConfigError, match=r"--device cuda or --cpus-per-worker"):
            resolve(config_of(), cluster)
        assert resolve(ServeConfig(cpus_per_worker=2), cluster).worker.num_cpus == 2


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterResources((Node(8), Node(4, is_for_ingress=True))),
        ClusterResources((Node(8),), {"penstock_ingress": 2.0}),
    ],
)
def test_ingresses_run_on_the_nodes_that_are_declared_for_them_one_on_each(cluster):
    assert resolve(config_of(), cluster).ingress.actor_options() == {
        "num_cpus": 0,
        "resources": {"penstock_ingress": 1},
    }


def test_ingresses_run_on_any_node_where_none_is_declared():
    assert resolve(config_of(), EIGHT).ingress == ReplicaResources(0)
    assert resolve(config_of(), None).ingress == ReplicaResources(0)


def test_a_gpu_for_each_worker_where_the_cluster_has_one():
    cluster = ClusterResources((Node(8), Node(8, 1)))
    resolved = resolve(config_of(2), cluster)
    assert resolved.worker == ReplicaResources(num_cpus=1, num_gpus=1)
    assert resolved.worker.actor_options() == {"num_cpus": 1, "num_gpus": 1}
    assert resolved.config.engine.threads is None
    assert resolve(config_of(tensor_parallel_size=4), cluster).worker.num_gpus == 4
    assert resolve(config_of(threads=2), cluster).worker.env_vars == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [("auto", 0, False), ("auto", 1, True), ("cpu", 1, False), ("cuda", 0, True)],
)
def test_the_device_setting_decides_before_the_cluster(device, num_gpus, expected):
    cluster = ClusterResources((Node(8, num_gpus),))
    assert uses_gpus(config_of(device=device), cluster) is expected
    assert uses_gpus(config_of(device=device), None) is (device == "cuda")


def test_the_gate_has_longer_next_to_cpu_workers_unless_it_is_set():
    assert resolve(ServeConfig(), EIGHT).config.gate_answer_ms == 200
    assert resolve(config_of(device="cuda"), EIGHT).config.gate_answer_ms == 20
    assert resolve(ServeConfig(gate_answer_ms=7), EIGHT).config.gate_answer_ms == 7


def test_the_variables_of_all_workers_of_a_machine():
    expected = resolve(config_of(2), EIGHT).worker.env_vars
    assert expected["OMP_NUM_THREADS"] == "4"
    assert variables_of_workers(config_of(2), EIGHT) == expected


@pytest.mark.parametrize(
    ("config", "cluster"),
    [
        (config_of(), ClusterResources((Node(8, num_gpus=1),))),
        (config_of(device="cuda", threads=2), EIGHT),
        (config_of(compute_cores="1,2"), EIGHT),
        (ServeConfig(models=(named("a", threads=1), named("b", threads=2))), EIGHT),
    ],
)
def test_workers_that_differ_or_are_not_on_all_cpus_have_no_variables_in_common(config, cluster):
    assert variables_of_workers(config, cluster) == {}


def test_all_else_stays_as_it_was_configured():
    config = config_of(2, kv="int8")
    resolved = resolve(config, EIGHT).config
    engine = dataclasses.replace(resolved.engine, threads=None)
    assert dataclasses.replace(resolved, engine=engine, gate_answer_ms=None) == config


def test_nodes_as_ray_reports_them():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0, "memory": 1e9}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {"penstock_ingress": 1.0}},
    ]
    expected = ClusterResources((Node(8, 1), Node(is_for_ingress=True)))
    assert ClusterResources.of_ray(nodes) == expected
    assert ClusterResources.of_ray([], {"GPU": 2}).can_have_gpus


def test_ray_makes_an_environment_only_where_it_is_asked_to():
    worker = ReplicaResources(1, env_vars={"A": "1"})  # the replica sets it itself
    assert worker.actor_options() == worker.actor_options({}) == {"num_cpus": 1}
    with_one = {"num_cpus": 1, "runtime_env": {"env_vars": {"B": "2"}}}
    assert worker.actor_options({"B": "2"}) == with_one
