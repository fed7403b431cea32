"""The wiring: what a worker's process gets from Ray."""

from __future__ import annotations

import pytest

from penstock.deployments.app import wire
from penstock.deployments.config import config_from


def worker_options(**settings):
    """Of the worker's deployment, which is the ingress's last argument."""
    ingress = wire(config_from({"device": "cpu", **settings}))._bound_deployment
    workers = ingress.init_args[-1]._bound_deployment
    return workers.ray_actor_options, workers.init_args[0].engine


@pytest.mark.parametrize("settings", [{}, {"threads": 3}])
def test_a_worker_computes_with_as_many_threads_as_openmp_is_told(settings):
    options, engine = worker_options(**settings)
    assert engine.threads == settings.get("threads", 1)
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == str(engine.threads)
