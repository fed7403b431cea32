"""A Ray head with a dashboard, for tests: `python -m` this module, PORT and FOLDER.

It ends with its standard input.
"""

from __future__ import annotations

import sys

import ray

if __name__ == "__main__":
    port, folder = sys.argv[1:]
    ray.init(
        address="local",
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=int(port),
        num_cpus=2,
        object_store_memory=128 << 20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    print("ready", flush=True)
    sys.stdin.read()
    ray.shutdown()
