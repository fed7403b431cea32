"""Figures that a page repeats are those of where they come from: manifests, metrics, results."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.docs.pages import ROOT

GUIDE, REFERENCE = ROOT / "docs" / "guide", ROOT / "docs" / "reference"
KUBERNETES = ROOT / "deployments" / "manifests" / "kubernetes"


def manifest(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text())


def workers(overlay: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Penstock's settings and the group of worker pods in an overlay."""
    config, group = manifest(f"{overlay}/workers.yaml")
    return yaml.safe_load(config["value"])["applications"][0]["args"], group["value"]


def test_the_kubernetes_page_has_the_figures_of_the_manifests():
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    gpu, gpu_pods = workers("gpu")
    cpu, cpu_pods = workers("cpu")
    assert f"one NVIDIA GPU each, up to {gpu_pods['maxReplicas']} | `{gpu['model']}`" in page
    assert f"four CPUs each, up to {cpu_pods['maxReplicas']} | `{cpu['model']}`" in page
    assert (cpu["cpus_per_worker"], gpu["num_workers"], cpu["num_workers"]) == (4, "1:8", "1:4")
    assert gpu["num_ingress"] == cpu["num_ingress"] == "2:4"
    assert "two to four ingresses" in page
    asked = [
        group["template"]["spec"]["containers"][0]["resources"]["requests"]
        for group in (gpu_pods, cpu_pods)
    ]
    assert (asked[0]["cpu"], asked[0]["memory"], asked[0]["nvidia.com/gpu"]) == ("8", "48Gi", "1")
    assert (asked[1]["cpu"], asked[1]["memory"]) == ("4", "8Gi")
    assert "8 CPUs, 48 GiB and one GPU" in page
    assert "4 CPUs and 8 GiB" in page
    ends = gpu_pods["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f"A pod has {ends} s to end" in page
    assert f"({gpu['drain_notice_s']} + {gpu['drain_s']})" in page
    assert f"{gpu['http_port']} (HTTP) and {gpu['grpc_port']} (gRPC)" in page


def test_the_metrics_that_keep_their_names_are_there():
    page = (GUIDE / "from-vllm.md").read_text()
    named = set(re.findall(r"`(vllm:\w+)`", page))
    known = set(re.findall(r"`(vllm:\w+)`", (REFERENCE / "metrics.md").read_text()))
    assert named == known


def cells(line: str) -> list[str]:
    return line.strip("| \n").split(" | ")


def test_the_figures_of_gguf_files_are_those_of_the_results():
    results = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    measured = results.split("<!-- begin gguf-types -->")[1].split("<!-- end")[0]
    by_type = {cells(line)[0]: cells(line) for line in measured.splitlines() if "%" in line}
    page = (GUIDE / "gguf.md").read_text().split("## Which one to take")[1].split("\n## ")[0]
    shown = [cells(line) for line in page.splitlines() if "%" in line and line.startswith("| Q")]
    assert len(shown) == 5
    for name, size, perplexity, kept, theirs in shown:
        _, _, *figures = by_type[name]
        bare = [re.sub(r" ± [\d.]+", "", figure) for figure in figures]
        assert [size, perplexity, kept, theirs] == bare, name
    for figure in ("307", "186", "1,296", "1,578", "2,106", "2,914", "160 MiB", "311 MiB"):
        assert figure in page
    speed = results.split("<!-- begin gguf-speed -->")[1].split("<!-- end")[0]
    for figure in ("306.9", "186.4", "1296.4", "1578.0", "2106.4", "2913.6", "160.4", "310.6"):
        assert f"| {figure} |" in speed
