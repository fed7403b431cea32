"""Named, detached Ray actors: one of each name in a cluster, made by the first process to use it.

Ray restarts them for ever. They outlive the process that made them; `cluster.py` kills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

NAMESPACE = "penstock"
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head node alone
CALL_TIMEOUT_S = 2.0  # longest that a caller on an event loop waits for an answer


def named_actor(
    cls: type,
    name: str,
    *args: Any,
    is_on_head: bool = False,
    thread_groups: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """The handle of the actor `name`; made as `cls(*args)` if there is none.

    `is_on_head`: keep it on the head node, which an autoscaler never removes; an actor without
    resources may run on any node, which the autoscaler then cannot remove. Without effect in a
    cluster whose head node lacks the resource for it. `thread_groups`: further
    threads, by Ray's concurrency group. `options` are added to Ray's actor options,
    or replace ours. Blocks until Ray's control plane answers; raises Ray's errors.
    """
    shared = {
        "name": name,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
    }
    if is_on_head and HEAD in ray.cluster_resources():
        shared["resources"] = {HEAD: 0.001}
    made = ray.remote(concurrency_groups=dict(thread_groups))(cls) if thread_groups else None
    return (made or ray.remote(cls)).options(**(shared | options)).remote(*args)
