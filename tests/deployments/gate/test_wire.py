"""Reports of workers, as the gate takes them."""

from __future__ import annotations

import math

import pytest

from penstock.deployments.gate.wire import STEP_S, report_from
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb


@pytest.mark.parametrize("step_s", [1e-300, 1e-9, 0.02, 1e9, math.inf, 0.0, -1.0, math.nan])
def test_the_duration_of_a_step_is_taken_within_bounds(step_s: float) -> None:
    """One near zero had the gate throw its state away at every tick."""
    message = pb.WorkerReport(epoch=1)
    message.report.step_s = step_s
    taken = report_from(message).step_s
    assert taken == 0.0 or STEP_S[0] <= taken <= STEP_S[1]
    assert (taken == 0.0) == (not step_s > 0)
    assert step_s != 0.02 or taken == 0.02
