"""cluster.yaml: prepared as `ray up` does before it calls a cloud, and read by its autoscaler."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.serve.schema import ServeDeploySchema

from penstock.deployments.config import config_from
from penstock.deployments.placement import INGRESS_RESOURCE, ClusterResources, Node, resolve

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cluster():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


@pytest.fixture
def config():
    text = (ROOT / "deployments" / "serve.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    return config_from(application.args)


def test_ray_up_prepares_and_accepts_it(cluster):
    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    assert prepared["available_node_types"]["head"]["max_workers"] == 0
    assert prepared["head_setup_commands"][-1].endswith("'boto3>=1.35'")
    assert prepared["worker_setup_commands"] == cluster["setup_commands"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"idle_timeout": 10}, "idle_timeout"),
        ({"head_node_type": "gpu_head"}, "head_node_type"),
        ({"max_workers": "8"}, "is not of type 'integer'"),
    ],
)
def test_ray_up_would_refuse_a_mistake(cluster, change, words):
    with pytest.raises((jsonschema.ValidationError, ValueError), match=words):
        validate_config(prepare_config({**cluster, **change}))


def test_the_autoscaler_reads_the_node_types_as_they_are_meant(cluster):
    types = AutoscalingConfig(prepare_config(cluster), skip_content_hash=True)
    nodes = types.get_node_type_configs()
    assert nodes["head"].resources == {"CPU": 0, INGRESS_RESOURCE: 1}
    assert nodes["ingress"].resources == {"CPU": 0, INGRESS_RESOURCE: 1}
    assert nodes["gpu_worker"].resources == {"CPU": 8, "GPU": 1}
    assert (nodes["gpu_worker"].min_worker_nodes, nodes["gpu_worker"].max_worker_nodes) == (0, 8)
    assert nodes["gpu_worker"].idle_timeout_s == 600
    assert nodes["gpu_worker"].labels == {"penstock/role": "worker"}


def test_a_worker_asks_for_a_gpu_before_a_node_has_one(cluster, config):
    head_alone = ClusterResources((Node(num_cpus=0, num_gpus=0, is_for_ingress=True),))
    resolved = resolve(config, head_alone)
    node = cluster["available_node_types"]["gpu_worker"]["resources"]
    assert resolved.worker.num_gpus == node["GPU"]
    assert resolved.worker.num_cpus <= node["CPU"]
    assert resolved.ingress.resources == {INGRESS_RESOURCE: 1}
    assert resolved.ingress.num_cpus == 0


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "wanted"),
    [(1, 1, {"gpu_worker": 1}), (4, 1, {"gpu_worker_4": 1}), (4, 2, {"gpu_worker_4": 2})],
)
def test_the_autoscaler_starts_the_nodes_that_a_workers_ranks_need(
    cluster, config, num_ranks, num_workers, wanted
):
    """By Ray's own scheduler, which finds the head and nothing else."""
    head_alone = ClusterResources((Node(num_cpus=0, num_gpus=0, is_for_ingress=True),))
    engine = dataclasses.replace(config.engine, tensor_parallel_size=num_ranks)
    worker = resolve(dataclasses.replace(config, engine=engine), head_alone).worker
    asked = ResourceRequestUtil.make({"GPU": worker.num_gpus, "CPU": worker.num_cpus})
    types = AutoscalingConfig(prepare_config(cluster), skip_content_hash=True)
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=types.get_node_type_configs(),
            max_num_nodes=types.get_max_num_worker_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count([asked] * num_workers),
        )
    )
    assert not reply.infeasible_resource_requests
    launched = {each.instance_type: each.count for each in reply.to_launch}
    launched.pop("head", None)
    assert launched == wanted


def test_clients_reach_the_listeners_with_a_key(cluster, config):
    (rule,) = cluster["provider"]["security_group"]["IpPermissions"]
    assert (rule["FromPort"], rule["ToPort"]) == (config.http_port, config.grpc_port)
    assert config.host == "0.0.0.0"
    assert not config.is_open
    installs = [each for each in cluster["setup_commands"] if config.api_keys_file in each]
    assert len(installs) == 1
    assert config.engine.model not in ("builtin", "builtin-moe")


def test_there_are_nodes_for_as_many_workers_as_may_run(cluster, config):
    assert config.is_autoscaled
    assert config.max_workers == cluster["available_node_types"]["gpu_worker"]["max_workers"]
    more = cluster["available_node_types"]["ingress"]["max_workers"]
    assert (config.min_ingress, config.max_ingress) == (1, 1 + more)  # the head has one
    assert config.max_workers + more <= cluster["max_workers"]
