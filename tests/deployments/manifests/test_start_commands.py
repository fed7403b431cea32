"""What the manifests say of nodes, run on this machine: their start commands, and the deployment.

`ray stop` of cluster.yaml is left out: it would end every Ray of this machine.
"""

from __future__ import annotations

import copy
import os
import shlex
import tempfile
from functools import partial
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)
from ray.autoscaler._private.util import prepare_config, with_head_node_ip

from tests.deployments.manifests.kuberay import groups, render
from tests.deployments.manifests.local_nodes import (
    APART,
    ROOT,
    alive,
    fetch,
    local_nodes,
    send,
)
from tests.deployments.ports import free_port
from tests.deployments.waiting import eventually

CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
KEY = "the-key"


@pytest.fixture
def nodes():
    # Not pytest's folder: Ray's sockets lie in it, and a path of one may have 107 bytes.
    folder = tempfile.TemporaryDirectory(prefix="pn-", ignore_cleanup_errors=True)
    with folder as home, local_nodes(Path(home)) as nodes:
        yield nodes


def of_this_machine(deploy, nodes):
    """`deploy` (a Serve configuration) with the ports and the key file of this test."""
    keys = nodes.home / "api-keys"
    keys.write_text(KEY + "\n")
    deploy["applications"][0]["args"] |= {
        "http_port": nodes.ports.http,
        "grpc_port": nodes.ports.grpc,
        "metrics_port": 0,
        "api_keys_file": str(keys),
    }
    return deploy


def commands_of(name):
    """The commands of cluster.yaml for a node, without `ray stop`."""
    stop, *rest = CLUSTER[name]
    assert stop == "ray stop"
    return rest


def with_flags(command, *flags):
    """`command`, whose last part is `ray start ...`, with flags for this machine."""
    assert "ray start" in command
    return f"{command} {shlex.join([*flags, *APART])}"


def autoscaler_config(ports):
    """What `ray up` puts on the head: cluster.yaml, here with nodes that are local processes."""
    config = prepare_config(copy.deepcopy(CLUSTER))
    types = config["available_node_types"]
    types[FAKE_HEAD_NODE_TYPE] = types.pop(config["head_node_type"])
    config["head_node_type"] = FAKE_HEAD_NODE_TYPE
    config["provider"] = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": f"127.0.0.1:{ports.gcs}",
        "head_node_id": FAKE_HEAD_NODE_ID,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
    }
    return config


@pytest.mark.timeout(900)
def test_the_head_deploys_and_the_deployment_brings_a_gpu_node(nodes):
    home, ports = nodes.home, nodes.ports
    deploy = yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text())
    deploy["applications"][0]["args"]["model"] = "builtin"  # nothing is fetched
    target = home / "penstock" / "deployments" / "serve.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(yaml.safe_dump(of_this_machine(deploy, nodes)))
    (home / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(autoscaler_config(ports)))

    start_head, wait, deploy_command = commands_of("head_start_ray_commands")
    nodes.begin(
        with_flags(
            start_head.replace("--port=6379", f"--port={ports.gcs}"),
            "--num-cpus=0",
            '--resources={"penstock_ingress": 1}',
            f"--dashboard-port={ports.dashboard}",
            f"--dashboard-agent-listen-port={ports.agent}",
            f"--temp-dir={home / 'r'}",
        ),
        {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        },
    )
    # Begun at once: `wait` is what makes the deployment late enough.
    nodes.run(wait)
    assert "Sent deploy request successfully" in nodes.run(deploy_command)

    nodes.connect()
    eventually(lambda: any("GPU" in node for node in alive()), 240, "a GPU node")
    (gpu_node,) = (node for node in alive() if "GPU" in node)
    assert (gpu_node["CPU"], gpu_node["GPU"]) == (8, 1)

    # The ingress is on the head, with its key; no worker is ready.
    listener = f"http://127.0.0.1:{ports.http}"
    eventually(lambda: fetch(f"{listener}/live") == 200, 240, "an ingress")
    assert fetch(f"{listener}/v1/models") == 401
    assert fetch(f"{listener}/v1/models", KEY) == 200
    assert fetch(f"{listener}/ready") == 503

    (start_worker,) = with_head_node_ip(commands_of("worker_start_ray_commands"), "127.0.0.1")
    num_nodes = len(alive())
    nodes.begin(
        with_flags(
            start_worker.replace(":6379", f":{ports.gcs}"),
            "--num-cpus=8",
            '--resources={"joined": 1}',
            "--dashboard-agent-listen-port=0",
        )
    )
    eventually(lambda: any("joined" in node for node in alive()), 240, "the second node")
    assert len(alive()) == num_nodes + 1


def kuberay_command(group, start):
    """`ray start` as KubeRay words it from a group: each parameter as it stands, in a shell."""
    parameters = dict(group["rayStartParams"])
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    parameters.setdefault("num-cpus", limits["cpu"])
    parameters["metrics-export-port"] = free_port()  # the nodes of this test share an address
    flags = " ".join(f"--{name}={value}" for name, value in parameters.items())
    return f"ulimit -n 65536; ray start {start} {flags} {shlex.join(APART)}"


def are_alive(num_nodes: int) -> bool:
    return len(alive()) == num_nodes


@pytest.mark.timeout(900)
def test_the_groups_of_the_rayservice_serve_what_it_deploys(nodes):
    ports = nodes.ports
    (service,) = (each for each in render("cpu") if each["kind"] == "RayService")
    started = dict(groups(service))
    head = (
        f"--head --port={ports.gcs} --dashboard-port={ports.dashboard} "
        f"--dashboard-agent-listen-port={ports.agent} --temp-dir={nodes.home / 'r'}"
    )
    nodes.begin(kuberay_command(started["head"], head))
    dashboard = f"http://127.0.0.1:{ports.dashboard}"
    # The head's probes, without a token; whatever else there is wants one.
    eventually(lambda: fetch(f"{dashboard}/api/gcs_healthz") == 200, 240, "the dashboard")
    eventually(
        lambda: fetch(f"http://127.0.0.1:{ports.agent}/api/local_raylet_healthz") == 200,
        60,
        "the agent",
    )
    assert fetch(f"{dashboard}/api/serve/applications/") == 401
    join = f"--address=127.0.0.1:{ports.gcs} --dashboard-agent-listen-port=0"
    nodes.connect()
    # One after the other: they share an address, by which a node that starts looks for itself.
    for num_nodes, name in ((2, "ingress"), (3, "cpu-worker")):
        nodes.begin(kuberay_command(started[name], join))
        eventually(partial(are_alive, num_nodes), 240, f"the node of {name}")
    assert sorted((node.get("CPU", 0), node.get("penstock_ingress", 0)) for node in alive()) == [
        (0, 0),
        (0, 1),
        (4, 0),
    ]

    # The operator sends the configuration with the token. One node for ingresses is here.
    deploy = of_this_machine(yaml.safe_load(service["spec"]["serveConfigV2"]), nodes)
    deploy["applications"][0]["args"]["num_ingress"] = "1:4"
    token = os.environ["RAY_AUTH_TOKEN"]
    send(f"{dashboard}/api/serve/applications/", token, deploy, method="PUT")
    listener = f"http://127.0.0.1:{ports.http}"
    eventually(lambda: fetch(f"{listener}/ready") == 200, 240, "a worker")
    answer = send(
        f"{listener}/v1/completions",
        KEY,
        {"model": "builtin", "prompt": "The sea was", "max_tokens": 8},
    )
    assert answer["usage"]["completion_tokens"] == 8
