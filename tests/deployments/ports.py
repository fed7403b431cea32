"""Free ports for servers that take theirs only when their cluster is up, many seconds later."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to outgoing connections (from 32768) and above those that Ray gives
# its workers (to 19999): starting a cluster takes hundreds of both, and then and again this one.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port that is free now and that the system does not assign by itself."""
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise RuntimeError(f"none of 100 ports in {PORTS} was free")
