"""A worker that takes itself for stuck sooner than in earnest."""

from __future__ import annotations

from typing import Any

from penstock.deployments.worker.replica import WorkerReplica

STALL_S = 20.0  # instead of 60, in which a rank that waits for another computes in vain


class ImpatientReplica(WorkerReplica):
    """Serve imports it in the replica's process."""

    def _make(self, *arguments: Any) -> None:
        from penstock.workers.engine import thread  # and torch, which reads the environment first

        thread.MAX_STALL_S = STALL_S
        super()._make(*arguments)
