"""Which running sequence gives its blocks back when they run out, and how long it then waits.

The largest one does: the longer an answer is, the more it still gets (lengths have long tails), and
the fewer answers are interrupted for the same memory. Meanwhile it is set aside: new requests are
admitted before it, so that short answers pass long ones, for a bounded number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from penstock.workers.scheduling.sequence import Sequence

MAX_PREEMPTIONS = 4  # of one sequence, while others can be preempted instead
YIELD_STEPS = 3000  # that a preempted sequence is set aside for, at most


def victim_of(running: Many[Sequence]) -> Sequence:
    """The sequence to preempt: lowest priority, then the largest, then the youngest.

    running: oldest first.

    Its size is what it has, or what it was predicted to get if that is more. Never the oldest
    while there are others, nor one that has been preempted MAX_PREEMPTIONS times, unless all have;
    then the youngest. So every sequence ends at some time.
    """
    others = running[1:] or running
    free = [seq for seq in others if seq.num_preemptions < MAX_PREEMPTIONS]
    if not free:
        return others[-1]
    return max(free, key=lambda seq: (seq.request.priority, seq.num_peak_tokens, seq.order))


def is_set_aside(seq: Sequence, step: int, others: Iterable[Sequence]) -> bool:
    """Whether new requests go before it: it was preempted within the last YIELD_STEPS.

    Not while one of `others` has a lower priority: that one is to make room first.
    """
    if seq.set_aside_at is None or step >= seq.set_aside_at + YIELD_STEPS:
        return False
    return all(other.request.priority <= seq.request.priority for other in others)
