"""`import penstock`: cheap, and everything public is found in it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.deployments.offline.llm import LLM, GenerationError
from penstock.deployments.offline.sampling_params import SamplingParams
from penstock.deployments.ray_data import build_processor


def test_importing_it_loads_no_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import penstock; penstock.__version__\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'grpc', 'fastapi', 'pydantic', 'tqdm'}\n"
        "print(*heavy & set(sys.modules), *(n for n in sys.modules if n.startswith('penstock.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_public_names() -> None:
    assert penstock.LLM is LLM
    assert penstock.GenerationError is GenerationError
    assert penstock.SamplingParams is SamplingParams
    assert set(penstock.__all__) <= set(dir(penstock))
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert penstock.__version__ == project["version"]
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'LLMs'"):
        _ = penstock.LLMs
    with pytest.raises(ImportError):
        from penstock import LLMs  # noqa: F401


def test_ray_data_is_a_module_and_loads_no_ray() -> None:
    from penstock.ray_data import build_processor as public

    assert public is build_processor
    script = "import sys, penstock.ray_data; print(*{'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
