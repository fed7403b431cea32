"""What a worker reports to its ingresses a few times a second: load, memory, and each request."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.peer import IngressPeer, RequestRoute
from penstock.workers.execution.step_model import MIN_STEPS
from penstock.workers.stats import EngineStats


def report_message(
    stats: EngineStats,
    routes: Sequence[RequestRoute],
    peer: IngressPeer,
    number: int,
    step_s: float,
    *,
    is_draining: bool = False,
    is_stalled: bool = False,
) -> pb.Report:
    """The report for `peer`. `number` grows with each report of a worker."""
    others = sum(route.num_expected for route in routes if route.peer is not peer)
    return pb.Report(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_blocks - stats.num_live_blocks,
        others_tokens=others,
        sequence=number,
        step_s=step_s,
        num_preemptions=stats.num_preemptions,
        block_size=stats.block_size,
        max_num_seqs=stats.max_num_seqs,
        # Counted from the deltas that were sent: stats lag behind during a long step.
        request_ids=[route.name for route in routes],
        generated=[route.num_generated for route in routes],
        prompt_tokens=[route.num_prompt for route in routes],
        max_tokens=[route.max_tokens for route in routes],
        is_draining=is_draining,
        is_stalled=is_stalled,
        step_costs=list(stats.step_model.values()) if stats.num_steps >= MIN_STEPS else [],
    )


class StepTimeAverage:
    """Exponentially weighted mean of the step time in seconds, from the engine's totals."""

    WEIGHT = 0.3  # of the steps since the last call

    def __init__(self) -> None:
        self.step_s = 0.0
        self._num_steps, self._seconds = 0, 0.0

    def observe(self, stats: EngineStats) -> None:
        seconds, num = sum(stats.step_seconds.values()), stats.num_steps - self._num_steps
        if num > 0:
            newest = (seconds - self._seconds) / num
            self.step_s += (StepTimeAverage.WEIGHT if self.step_s else 1.0) * (newest - self.step_s)
        self._num_steps, self._seconds = stats.num_steps, seconds
