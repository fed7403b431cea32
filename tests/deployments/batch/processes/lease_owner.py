"""A process that acquires a lease: `python -m` this module, FOLDER and POLLS.

While it has the lease it appends its fence number to FOLDER/log, as one `commit` after the other,
and prints when it gets and loses the lease. POLLS: STALE_POLLS, each 50 ms.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from penstock.deployments.batch import lease as lease_module
from penstock.deployments.batch.file_lock import LockError
from penstock.deployments.batch.lease import LeaseLost, hold


async def main(folder: Path, polls: int) -> None:
    lease_module.RENEW_S, lease_module.POLL_S, lease_module.STALE_POLLS = 0.1, 0.05, polls
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        try:
            async with hold(folder / "lease", folder / "lock", waits=True) as lease:
                print(f"has {lease.owner.fence}", flush=True)
                while True:
                    with lease.commit():
                        os.write(log, f"{lease.owner.fence}\n".encode())
                    await asyncio.sleep(0.001)
        except LeaseLost as error:
            print(f"lost: {error}", flush=True)
        except LockError as error:  # another one was stopped within a commit
            print(f"stuck: {error}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
