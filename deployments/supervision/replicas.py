"""Start-up code that all replicas share: the log, the cluster's resources, error messages.

Used by the replicas of ingress and worker, and (resources) by app.py and cluster.py.
"""

from __future__ import annotations

import copy
import logging

import ray

from penstock.deployments.config import ServeConfig
from penstock.deployments.placement import ClusterResources
from penstock.deployments.supervision.ray_workarounds import declared_resources, serve_logger

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def cluster_resources() -> ClusterResources | None:
    """The nodes of the cluster that this process is connected to; None: it is connected to none."""
    if not ray.is_initialized():
        return None
    return ClusterResources.of_ray(ray.nodes(), declared_resources())


class _ServeLogHandler(logging.Handler):
    """Passes log lines to the logger of the replica, which Serve keeps in a file.

    A replica's stderr reaches that file too, but Serve then walks the stack of each line to find
    its writer, which is a good part of what a short request costs.
    """

    def __init__(self, serve: logging.Logger):
        super().__init__()
        self._serve = serve

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)
        line.msg, line.args = f"{record.name}: {record.getMessage()}", None
        self._serve.handle(line)


def configure_logging(config: ServeConfig) -> None:
    """Send Penstock's log lines to Serve's file of this replica; outside a replica, to stderr."""
    ours, serve = logging.getLogger("penstock"), serve_logger()
    if serve.handlers:
        ours.handlers, ours.propagate = [_ServeLogHandler(serve)], False
    else:
        logging.basicConfig(format=LOG_FORMAT)
    ours.setLevel(config.log_level.upper())


def start_failure(who: str, error: Exception) -> str:
    """The message for the operator when a replica (`who`: "a worker") could not start."""
    kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
    return f"{who} could not start: {kind}{error}"
