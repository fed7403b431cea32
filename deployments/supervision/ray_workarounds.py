"""Every place where we lean on what Ray does not promise, one function each.

Each says which behaviour of Ray it works around, and what to look at when Ray is upgraded; its
test fails when the internals have moved. No function imports Ray before it is called.
"""

from __future__ import annotations

import logging

SEEN_ON = "2.60"  # the version of Ray for which all of this was found to be needed


def driver_environment() -> dict[str, str]:
    """Environment variables that the process which starts Ray needs, before Ray is imported.

    `RAY_worker_niceness` is internal: Ray starts its workers at nice 15, so every other process of
    the machine takes precedence over replicas. Look for a documented setting, or another default.
    """
    return {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }


def one_event_loop() -> dict[str, str]:
    """Environment variables of a replica whose own code shares Serve's event loop.

    By default Serve runs the code of a deployment on a loop of its own; gRPC then wakes both loops
    for every message. Internal: look in serve/_private/constants.py whether the name is still read.
    """
    return {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}


def is_start_timeout(error: Exception) -> bool:
    """Whether `ray.init` failed because Ray's processes missed their fixed 30 s.

    Ray raises a bare Exception for it; all its other errors have a type. Look in
    _private/node.py for a typed error, or for a setting of the time.
    """
    return type(error) is Exception


def serve_logger() -> logging.Logger:
    """The logger that Serve writes to the file of each replica; without handlers outside a replica.

    Its name is a private constant. Look for a public way to log into that file.
    """
    from ray.serve._private.constants import SERVE_LOGGER_NAME

    return logging.getLogger(SERVE_LOGGER_NAME)


def keep_serve_port_local() -> None:
    """Bind the gRPC port that Serve is about to open for this replica to the loopback address.

    Serve opens the port on every interface and unpickles what is sent to it: any machine that can
    connect could run code. Serve uses the port only where its calls go over gRPC instead of Ray.
    Look in serve/_private/replica.py whether the port is still opened, and where.
    """
    from ray.serve._private import constants, replica

    if constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        return
    add_port = replica.add_port_to_grpc_server

    def add_local_port(server, address):  # type: ignore[no-untyped-def]
        return add_port(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_local_port
