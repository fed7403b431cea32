"""Time limits of the product that spare clients a wait, lengthened for tests of other things.

A machine that stands still for a second, or whose disk does, misses them: then a stream is not kept
in the store, a response is not found, or a grammar is refused. Tests of a store that is away see a
refused connection, which takes no time.
"""

from __future__ import annotations

import pytest

from penstock.deployments.ingress.dispatch import shared_refusals
from penstock.deployments.ingress.journal import (
    background,
    batches,
    follow,
    idempotency,
    journals,
    values,
)
from penstock.deployments.security import quotas
from penstock.workers.structured import sandbox
from penstock.workers.text import chat_template

STORE_S = 20.0
# Of CPU time: some virtual machines count the time for which they stood still.
CPU_S = 5.0

_BUDGETS = (
    (journals, ("BEGIN_BUDGET_S", "RESUME_BUDGET_S", "FLUSH_BUDGET_S")),
    (values, ("BUDGET_S", "END_BUDGET_S")),
    (shared_refusals, ("PUT_BUDGET_S", "GET_BUDGET_S")),
    *((module, ("BUDGET_S",)) for module in (background, batches, follow, idempotency, quotas)),
)


def be_patient(patch: pytest.MonkeyPatch) -> None:
    for module, names in _BUDGETS:
        for name in names:
            patch.setattr(module, name, STORE_S)
    patch.setattr(chat_template, "MAX_CPU_S", CPU_S)
    patch.setattr(sandbox.Helper.__init__, "__defaults__", (CPU_S,))
