"""The progress of `penstock batch` where no terminal shows a bar."""

from __future__ import annotations

import io

from penstock.deployments.batch.part_file import TokenCounts
from penstock.deployments.batch.runner import Progress
from penstock.deployments.cli.batch_progress import LINE_S, QUIET_S, STALLED_S, Lines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(progress: Progress) -> tuple[Lines, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    return Lines(progress, file, clock), file, clock


def test_a_line_says_how_far_the_batch_is_how_fast_and_when_it_ends():
    progress = Progress(400, num_completed=100, tokens=TokenCounts(completion=9000))
    lines, file, clock = lines_of(progress)  # resumed: speeds are of this process
    clock.now += LINE_S
    progress.num_completed, progress.num_failed, progress.num_in_flight = 145, 5, 64
    progress.tokens = TokenCounts(completion=19_000)
    lines.renew()
    assert file.getvalue() == (
        "150 of 400 requests (37 %), 5.0 req/s, 1,000 tok/s, 64 in flight, 5 failed, 50 s left\n"
    )


def test_a_batch_that_gets_no_answers_says_why_and_seldom():
    progress = Progress(400)
    lines, file, clock = lines_of(progress)
    progress.num_completed = 10
    clock.now += LINE_S
    lines.renew()
    progress.num_sent_again, progress.cause = 12, "worker_lost"
    for _ in range(int(2 * QUIET_S / LINE_S)):
        clock.now += LINE_S
        lines.renew()
    first, *others = file.getvalue().splitlines()
    assert first.endswith("left")
    assert len(others) == 2
    assert "12 sent again (worker_lost), no answer for 60 s" in others[0]
    assert "left" not in others[1]
    assert STALLED_S < QUIET_S


def test_the_last_line_is_not_said_twice():
    progress = Progress(3)
    lines, file, clock = lines_of(progress)
    progress.num_completed = 3
    clock.now += 1.0
    lines.renew()
    lines.close()
    assert file.getvalue().count("3 of 3 requests (100 %)") == 1
