"""Adapters that are loaded and dropped while a worker serves, and what it tells of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from penstock.workers.adapters.table import AdapterTable
from penstock.workers.errors import LoadError
from penstock.workers.stats import AdapterChange, WorkerInfo

log = logging.getLogger("penstock.worker")

MAX_FAILURES = 16  # that a heartbeat tells of


def adapter_fields(
    table: AdapterTable, changes: Sequence[AdapterChange], before: WorkerInfo | None = None
) -> dict[str, Any]:
    """Make `changes` in their order, and return the fields of WorkerInfo that say what is there.

    A change that fails changes nothing, and is among the failures. `before`: the last info.
    """
    failures = [] if before is None else list(before.adapter_failures)
    number = 0 if before is None else before.adapter_change
    for change in changes:
        if change.number <= number:
            continue
        number = change.number
        if change.folder is None:
            table.unload(change.name)
            continue
        try:
            table.load(change.name, change.folder)
        except LoadError as error:
            failures.append((number, str(error)))
        except Exception:
            log.exception("adapter %s could not be loaded", change.name)
            failures.append((number, f"{change.folder} could not be read; a worker's log says why"))
    return {
        "adapters": tuple(table.names),
        "adapter_bytes": table.total_bytes,
        "adapter_change": number,
        "adapter_failures": tuple(failures[-MAX_FAILURES:]),
    }
