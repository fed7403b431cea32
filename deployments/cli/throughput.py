"""A log line every few seconds while workers are busy: throughput, batch and KV cache.

Pure arithmetic on the statistics that workers send with their heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.workers.stats import EngineStats

LINE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Totals:
    prompt: int = 0
    generated: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0


class Throughput:
    """Turns snapshots into lines. `clock` gives seconds; a worker is known by its epoch."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._since_s = clock()
        self._before: dict[int, EngineStats] = {}

    def line(self, workers: Sequence[tuple[int, EngineStats]], num_at_gate: int = 0) -> str | None:
        """The line for the last seconds; None if it is not due, or no worker did anything.

        `num_at_gate`: requests that wait there; others wait at their worker.
        """
        elapsed_s = self._clock() - self._since_s
        if elapsed_s < LINE_S:
            return None
        done = [_difference(stats, self._before.get(epoch)) for epoch, stats in workers]
        self._since_s = self._clock()
        self._before = dict(workers)
        stats_now = [stats for _, stats in workers]
        num_running = sum(stats.num_running for stats in stats_now)
        num_waiting = num_at_gate + sum(stats.num_waiting for stats in stats_now)
        prompt = sum(each.prompt for each in done)
        generated = sum(each.generated for each in done)
        if not (num_running or num_waiting or prompt or generated):
            return None
        kv = _percent(
            sum(stats.num_live_blocks for stats in stats_now),
            sum(stats.num_blocks for stats in stats_now),
        )
        hits = _percent(
            sum(each.prefix_hit for each in done), sum(each.prefix_queried for each in done)
        )
        return (
            f"prompt {prompt / elapsed_s:,.0f} tok/s, generated {generated / elapsed_s:,.0f} "
            f"tok/s, running {num_running}, waiting {num_waiting}, KV {kv}, prefix hits {hits}"
        )


def _difference(now: EngineStats, before: EngineStats | None) -> _Totals:
    before = before or EngineStats()
    return _Totals(
        prompt=now.num_prompt_tokens - before.num_prompt_tokens,
        generated=now.num_generated_tokens - before.num_generated_tokens,
        prefix_queried=now.num_prefix_queried_tokens - before.num_prefix_queried_tokens,
        prefix_hit=now.num_prefix_hit_tokens - before.num_prefix_hit_tokens,
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
