"""Times for tests of processes: leases are lost two seconds after the last renewal, not twenty, and
requests are sent again after a second, not thirty.

`python -m` this module is the `penstock` command with such times.
"""

from __future__ import annotations

import sys

from penstock.deployments.batch import lease, target
from penstock.deployments.cli.main import main


def shorten() -> None:
    lease.RENEW_S, lease.POLL_S, lease.STALE_POLLS = 0.2, 0.1, 20
    target.LONGEST_WAIT_S = 1.0


if __name__ == "__main__":
    shorten()
    sys.exit(main(sys.argv[1:]))
