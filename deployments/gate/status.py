"""The gate's state for operators: what waits and why, and what each worker holds.

Workers are named by the first digits of their epoch, as the status of workers names them; their
addresses are not shown.
"""

from __future__ import annotations

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.wire import wait_message
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb


def explain(gate: Gate, num_waiting: int, now: float, limit: int) -> pb.ExplainResponse:
    """The first `limit` waiting requests with their reasons, and the workers' ledgers."""
    accounts = [
        pb.WorkerAccount(
            worker=_shown(gate, name),
            num_held=len(ledger),
            slots=ledger.spec.slots,
            used=ledger.used(now),
            capacity=ledger.spec.capacity,
            headroom=ledger.headroom.share,
            is_open=ledger.is_open,
        )
        for name, ledger in gate.ledgers.items()
    ]
    waits = [wait_message(each) for each in gate.explain(now, limit)]
    for wait in waits:
        wait.worker = _shown(gate, wait.worker)
    return pb.ExplainResponse(waits=waits, workers=accounts, num_waiting=num_waiting)


def _shown(gate: Gate, name: str) -> str:
    ledger = gate.ledgers.get(name)
    return "" if ledger is None else f"{ledger.spec.epoch:016x}"[:8]
