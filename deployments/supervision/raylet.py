"""Notices the end of the raylet of a server's own Ray, with which every process that serves ends.

Nothing else tells the driver: its calls to actors go on being tried. Imports Ray when called.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable

from penstock.deployments.supervision.processes import keep_orphans

POLL_S = 0.5


def watch_raylet(on_end: Callable[[str], None], stopping: threading.Event) -> None:
    """On another thread, call `on_end` with what happened if the raylet ends before `stopping`.

    The raylet's children stay descendants of this process, so that it can end them. Call it after
    `ray.init` has started a node here. Raises AttributeError or KeyError if Ray keeps its processes
    elsewhere than it did.
    """
    from ray._private import worker

    [raylet] = worker._global_node.all_processes["raylet"]
    process: subprocess.Popen[bytes] = raylet.process
    keep_orphans()

    def watch() -> None:
        while not stopping.wait(POLL_S):
            status = process.poll()
            if status is not None and not stopping.is_set():
                on_end(told(status))
                return

    threading.Thread(target=watch, name="penstock-raylet", daemon=True).start()


def told(status: int) -> str:
    """What that exit status of the raylet means for the server."""
    how = f"status {status}"
    if status < 0:
        how = signal.Signals(-status).name
    return (
        f"Ray's process of this machine (raylet) has ended ({how}), and all that serve end with "
        "it. Was the machine out of memory (see dmesg)? Start the server again; with "
        "--ray-dir FOLDER Ray's logs are kept"
    )
