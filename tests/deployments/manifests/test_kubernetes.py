"""The Kubernetes manifests: rendered by kustomize, and held against the schemas of what reads them.

Kubernetes' own for its kinds, KubeRay's for the RayService, Ray's for what stands inside it.
"""

from __future__ import annotations

import copy
import os
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray._common.utils import import_attr
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.serve.schema import ServeDeploySchema

from penstock.deployments.config import config_from
from penstock.deployments.placement import INGRESS_RESOURCE
from tests.deployments.manifests.kuberay import MANIFESTS, check_ray_service, groups, render

ROOT = Path(__file__).parents[3]
OVERLAYS = ("gpu", "cpu")
KUBERNETES = ("1.30", "1.37")  # oldest and newest that are checked
KINDS = {"RayService", "Service", "PodDisruptionBudget", "NetworkPolicy"}


RENDERED = {overlay: render(overlay) for overlay in OVERLAYS}


@pytest.fixture(params=OVERLAYS)
def objects(request):
    return copy.deepcopy(RENDERED[request.param])


@pytest.fixture
def service(objects):
    (found,) = (each for each in objects if each["kind"] == "RayService")
    return found


@pytest.fixture
def deploy(service):
    return ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))


@pytest.fixture
def config(deploy):
    (application,) = deploy.applications
    return config_from(application.args)


def group_of(service, role):
    found = [
        group
        for _, group in groups(service)
        if group["template"]["metadata"]["labels"]["penstock/role"] == role
    ]
    assert len(found) == 1
    return found[0]


def container_of(group):
    (container,) = group["template"]["spec"]["containers"]
    return container


def ports_of(group):
    return {port["name"]: port["containerPort"] for port in container_of(group)["ports"]}


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_that_its_api_takes(objects, version):
    assert {each["kind"] for each in objects} == KINDS
    for each in objects:
        if each["kind"] == "RayService":
            check_ray_service(each, version)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelt_field_is_found_at_every_depth(service):
    cluster = ("spec", "rayClusterConfig")
    worker = (*cluster, "workerGroupSpecs", 1)
    pod = (*worker, "template", "spec")
    for path in (
        ("spec",),
        cluster,
        (*cluster, "autoscalerOptions"),
        (*cluster, "autoscalerOptions", "securityContext"),
        worker,
        pod,
        (*pod, "containers", 0),
        (*pod, "containers", 0, "livenessProbe", "httpGet"),
    ):
        broken = copy.deepcopy(service)
        node = broken
        for key in path:
            node = node[key]
        node["replica"] = 1
        with pytest.raises(jsonschema.ValidationError, match="replica"):
            check_ray_service(broken, KUBERNETES[1])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0, "is not of type 'string'"),
        (("headGroupSpec", "template", "spec", "restartPolicy"), "Always", "restartPolicy Never"),
        (("headGroupSpec", "resources"), {"CPU": "0"}, "resources stand in"),
        (("rayVersion",), "2.50.0", "2.52 or later"),
        (("autoscalerOptions", "version"), "v3", "v3"),
    ],
)
def test_what_the_operator_would_refuse_is_found(service, path, value, words):
    node = service["spec"]["rayClusterConfig"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, ValueError), match=words):
        check_ray_service(service, KUBERNETES[1])


def test_rays_autoscaler_reads_the_groups_as_they_are_meant(service, config):
    cluster = {
        "metadata": {"name": "penstock", "namespace": "default"},
        "spec": service["spec"]["rayClusterConfig"],
    }
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    resources = {
        name: {key: value for key, value in each["resources"].items() if key != "memory"}
        for name, each in types.items()
    }
    worker = group_of(service, "worker")["groupName"]
    cpus = int(container_of(group_of(service, "worker"))["resources"]["limits"]["cpu"])
    gpus = {"GPU": 1} if config.engine.device == "cuda" else {}
    assert resources == {
        "headgroup": {"CPU": 0},
        "ingress": {"CPU": 0, INGRESS_RESOURCE: 1},
        worker: {"CPU": cpus, **gpus},
    }
    assert types[worker]["min_workers"] == 0


def test_the_application_is_built_from_what_the_manifest_says(service, deploy, config):
    (application,) = deploy.applications
    built = import_attr(application.import_path)(application.args)
    worker = built._bound_deployment.init_args[-1]._bound_deployment
    options = worker.ray_actor_options
    limits = container_of(group_of(service, "worker"))["resources"]["limits"]
    assert options.get("num_gpus", 0) == int(limits.get("nvidia.com/gpu", 0))
    assert options["num_cpus"] <= int(limits["cpu"])
    assert not config.is_open


def test_there_are_pods_for_as_many_replicas_as_may_run(service, config):
    assert config.is_autoscaled
    workers = group_of(service, "worker")
    assert config.max_workers == workers["maxReplicas"]
    ingress = group_of(service, "ingress")
    assert (config.min_ingress, config.max_ingress) == (
        ingress["minReplicas"],
        ingress["maxReplicas"],
    )


def test_ports_agree_from_the_listener_to_the_network_policy(objects, service, config):
    listeners = {config.http_port, config.grpc_port}
    ports = ports_of(group_of(service, "ingress"))
    assert ports["http"] == config.http_port
    assert ports["grpc"] == config.grpc_port
    assert ports["penstock"] == config.metrics_port
    by_name = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    assert {port["port"] for port in by_name["penstock"]["spec"]["ports"]} == listeners
    for each in by_name.values():
        for port in each["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    policies = {
        each["metadata"]["name"]: each for each in objects if each["kind"] == "NetworkPolicy"
    }
    (open_to_all,) = policies["penstock-ingress"]["spec"]["ingress"]
    assert {port["port"] for port in open_to_all["ports"]} == listeners
    monitoring = policies["penstock"]["spec"]["ingress"][1]
    assert {port["port"] for port in monitoring["ports"]} == {config.metrics_port, ports["metrics"]}


def test_no_port_is_used_twice_in_a_pod(service):
    for _, group in groups(service):
        ports = ports_of(group)
        assert len(set(ports.values())) == len(ports)
        assert group["rayStartParams"]["metrics-export-port"] == str(ports["metrics"])


def test_every_selector_finds_a_pod(objects, service):
    pods = [group["template"]["metadata"]["labels"] for _, group in groups(service)]
    num_selectors = 0
    for each in objects:
        spec = each["spec"]
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector is None:
                continue
            num_selectors += 1
            labels = selector.get("matchLabels", selector)
            assert any(labels.items() <= pod.items() for pod in pods), (each["metadata"], labels)
    assert num_selectors == 8


def test_each_limit_of_time_lies_above_the_one_inside_it(service, deploy, config):
    (application,) = deploy.applications
    ingress = import_attr(application.import_path)(application.args)._bound_deployment
    replicas = {"ingress": ingress, "worker": ingress.init_args[-1]._bound_deployment}
    longest_s = config.drain_notice_s + config.drain_s
    for role, replica in replicas.items():
        group = group_of(service, role)
        container = container_of(group)
        env = {each["name"]: each["value"] for each in container["env"]}
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        delay_s = 0 if before is None else int(before[1])
        assert (role == "ingress") == (delay_s > 0)
        replica_s = replica._deployment_config.graceful_shutdown_timeout_s
        node_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        pod_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert longest_s < replica_s < node_s
        assert node_s + delay_s < pod_s
        assert longest_s + 40 <= node_s
        assert longest_s + 60 <= pod_s
        assert pod_s < service["spec"]["rayClusterDeletionDelaySeconds"]


def test_keys_come_from_a_secret_that_the_manifests_do_not_contain(objects, service, config):
    assert not any(each["kind"] == "Secret" for each in objects)
    group = group_of(service, "ingress")
    (mount,) = (each for each in container_of(group)["volumeMounts"] if each["name"] == "api-keys")
    assert config.api_keys_file == f"{mount['mountPath']}/api-keys"
    volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == "penstock-api-keys"
    assert service["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"


def test_no_pod_has_rights_that_it_does_not_need(service):
    for name, group in groups(service):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        context = container_of(group)["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        if name != "head":  # KubeRay gives the head, whose autoscaler starts pods, an account
            assert spec["automountServiceAccountToken"] is False


def test_versions_are_those_of_this_repository(service):
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={service['spec']['rayClusterConfig']['rayVersion']}" in pins
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, group in groups(service):
        image = container_of(group)["image"]
        assert image.rpartition(":")[2].removesuffix("-cuda") == version


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_component_for_redis_keeps_the_password_in_a_secret(tmp_path, version):
    relative = os.path.relpath(MANIFESTS, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{relative}/cpu]\ncomponents: [{relative}/redis]\n"
    )
    (service,) = (each for each in render(str(tmp_path)) if each["kind"] == "RayService")
    check_ray_service(service, version)
    options = service["spec"]["rayClusterConfig"].pop("gcsFaultToleranceOptions")
    assert options["redisAddress"] == "redis:6379"
    assert list(options["redisPassword"]) == ["valueFrom"]
    (plain,) = (each for each in RENDERED["cpu"] if each["kind"] == "RayService")
    assert service == plain  # and nothing else
