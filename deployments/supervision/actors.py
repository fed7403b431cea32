"""Named, detached Ray actors: one of each name in a cluster, made by the first process to ask.

Ray restarts them for ever. They outlive the process that made them; `cluster.py` kills them.
"""

from __future__ import annotations

from typing import Any

import ray

NAMESPACE = "penstock"
CALL_TIMEOUT_S = 2.0  # longest that a caller on an event loop waits for an answer


def named_actor(cls: type, name: str, *args: Any, **options: Any) -> Any:
    """The handle of the actor `name`; made as `cls(*args)` if there is none.

    `options` are added to Ray's actor options, or replace ours. Blocks until Ray's control plane
    answers; raises Ray's errors.
    """
    shared = {
        "name": name,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
    }
    return ray.remote(cls).options(**(shared | options)).remote(*args)
