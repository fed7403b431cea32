"""Leases that are lost two seconds after the last renewal, not twenty, for tests of processes.

`... -m tests.deployments.batch.quick_lease ARGUMENTS` is the `penstock` command with such leases.
"""

from __future__ import annotations

import sys

from penstock.deployments.batch import lease
from penstock.deployments.cli.main import main


def shorten() -> None:
    lease.RENEW_S, lease.POLL_S, lease.STALE_POLLS = 0.2, 0.1, 20


if __name__ == "__main__":
    shorten()
    sys.exit(main(sys.argv[1:]))
