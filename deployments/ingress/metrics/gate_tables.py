"""The metrics of the gate and of an ingress's connection to it: tables that collector.py reads.

docs/reference/metrics.md says what each means.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.deployments.ingress.dispatch.gate_client import GateClient

_Of = Callable[[GateClient], float]

WAIT_HISTOGRAM = "penstock_gate_wait_seconds"

GATE_GAUGES: tuple[tuple[str, str, _Of], ...] = (
    (
        "penstock_gate_connected",
        "Whether this ingress is connected to the gate.",
        lambda g: g.is_connected,
    ),
    (
        "penstock_gate_breaker_open",
        "Whether the circuit breaker is open: after faults, this ingress does not ask the gate.",
        lambda g: g.breaker_state == "open",
    ),
    ("penstock_gate_waiting", "Requests that wait at the gate.", lambda g: g.figures.num_waiting),
    (
        "penstock_gate_preemptions_per_100",
        "Preemptions of workers per 100 requests that ended, since the gate started.",
        lambda g: 100 * g.figures.num_preemptions / max(1, g.figures.num_completed),
    ),
    (
        "penstock_gate_retry_after_factor",
        "Learnt factor on the predicted waits from which Retry-After is made.",
        lambda g: g.figures.retry_after_factor,
    ),
)

GATE_COUNTERS: tuple[tuple[str, str, _Of], ...] = (
    (
        "penstock_gate_breaker_opened",
        "Times that the circuit breaker opened.",
        lambda g: g.breaker.num_opened,
    ),
    (
        "penstock_gate_declined",
        "Requests that workers without room declined.",
        lambda g: g.figures.num_declined,
    ),
    (
        "penstock_gate_waits",
        "Requests that had to wait and were admitted.",
        lambda g: g.figures.num_waits,
    ),
    (
        "penstock_gate_predicted_wait_seconds",
        "Waits of these as predicted on arrival.",
        lambda g: g.figures.predicted_wait_s,
    ),
    (
        "penstock_gate_actual_wait_seconds",
        "Actual waits of these.",
        lambda g: g.figures.actual_wait_s,
    ),
    (
        "penstock_gate_wait_error_seconds",
        "Absolute differences between the two.",
        lambda g: g.figures.wait_error_s,
    ),
    (
        "penstock_predictor_learnt",
        "Answers that the length predictor has learnt from.",
        lambda g: g.figures.num_learnt,
    ),
)

ADMISSIONS: tuple[tuple[str, _Of], ...] = (
    ("pass", lambda g: g.num_on_credit),
    ("ticket", lambda g: g.num_ticketed),
    ("fallback", lambda g: g.num_fallback),
)
RETRY_AFTER: tuple[tuple[str, _Of], ...] = (
    ("in_time", lambda g: g.figures.num_retry_after_in_time),
    ("late", lambda g: g.figures.num_retry_after_late),
)
