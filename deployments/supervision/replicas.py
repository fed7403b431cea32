"""What every replica of ours does when it starts: its log, Serve's own port, words for a failure.

Knows nothing of what the replica is for.
"""

from __future__ import annotations

import copy
import logging

import ray
from ray.serve._private import constants as serve_constants
from ray.serve._private import replica as serve_replica
from ray.serve._private.constants import SERVE_LOGGER_NAME

from penstock.deployments.config import ServeConfig

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def wants_gpus(config: ServeConfig) -> bool:
    """Whether each worker is to have a GPU of the cluster that we are connected with."""
    if config.engine.device != "auto":
        return config.engine.device == "cuda"
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1


def hide_serve_port() -> None:
    """Keep the replica's own gRPC port, which Serve is about to open, on this machine.

    Serve 2.60 opens it on every interface and unpickles what anybody sends there. It is used only
    where Serve's calls go over gRPC instead of Ray, so nothing misses it.
    """
    if serve_constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        return
    add_port = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(
        server, address.replace("[::]", "127.0.0.1")
    )


class _ToServe(logging.Handler):
    """Hands our lines to the logger of the replica, which Serve keeps in a file.

    What is written to a replica's stderr comes there too, but by way of a search through the stack
    for who wrote it: a good part of what a short request costs.
    """

    def __init__(self, serve: logging.Logger):
        super().__init__()
        self._serve = serve

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)
        line.msg, line.args = f"{record.name}: {record.getMessage()}", None
        self._serve.handle(line)


def configure_logging(config: ServeConfig) -> None:
    """Our own log lines go where Serve's go, a file per replica; outside of Serve, to stderr."""
    ours, serve = logging.getLogger("penstock"), logging.getLogger(SERVE_LOGGER_NAME)
    if serve.handlers:
        ours.handlers, ours.propagate = [_ToServe(serve)], False
    else:
        logging.basicConfig(format=LOG_FORMAT)
    ours.setLevel(config.log_level.upper())


def in_words(who: str, error: Exception) -> str:
    """What an operator reads of a replica that could not start."""
    kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
    return f"{who} could not start: {kind}{error}"
