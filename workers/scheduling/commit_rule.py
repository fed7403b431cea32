"""Commit or recompute: whether pending tokens stay without stored K and V for one more step.

A pending token is one whose K and V are not stored: it is computed again in its sequence's next
step. Two comparisons decide. First nt, the rows that a step computes in the time of one: pending
tokens below it cost nothing. Beyond it td, the time to compute them again, against tl, the time
that loading takes instead. What is loaded differs: `always` compares with a step's reads of K and
V, as the idea was published; under pressure the alternative is a preemption, so `instead` compares
with what bringing the preempted sequence back takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.workers.errors import ConfigError

STAYS = ("free", "cheaper")  # branches in which the tokens stay without stored K and V
BRANCHES = (*STAYS, "dearer", "limit")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a sequence's pending tokens, and by which numbers."""

    branch: str  # of BRANCHES
    num_pending: int
    num_scheduled: int  # other rows of the step
    ridge_tokens: float  # nt
    compute_s: float  # td: of computing the pending tokens again, as far as it takes time
    load_s: float  # tl: of what is loaded instead
    step_s: float = 0.0  # of compute_s, what this step alone takes
    is_pressed: bool = False  # no block was free: tl is of the sequence that would be preempted

    @property
    def stays(self) -> bool:
        """Whether they are not stored in this step."""
        return self.branch in STAYS

    def __str__(self) -> str:
        other = "a preemption" if self.is_pressed else "reading K and V"
        because = {
            "free": f"with {self.num_scheduled} other rows they are below the ridge",
            "cheaper": f"computing them again takes less than {other}",
            "dearer": f"computing them again takes longer than {other}",
            "limit": "one sequence may not have that many",
        }[self.branch]
        verb = "stay uncommitted" if self.stays else "are not deferred"
        return (
            f"{self.num_pending} pending tokens {verb}: {because} (nt {self.ridge_tokens:.0f}, "
            f"td {self.compute_s * 1e3:.3f} ms, tl {self.load_s * 1e3:.3f} ms)"
        )


@dataclass(frozen=True, slots=True)
class CommitRule:
    """The two comparisons with one device's numbers.

    nt is one budget for the whole batch, so it is reduced by what the step computes anyway (the
    published rule gives it to each sequence). m pending tokens are free while
    m <= nt - scheduled; beyond that each row takes `compute_s_per_token`.
    """

    ridge_tokens: float  # nt
    read_s_per_token: float  # of one cached token in a step: kappa / B
    compute_s_per_token: float  # of one row beyond the ridge: c / F
    max_per_sequence: int = 64

    def __post_init__(self) -> None:
        if self.ridge_tokens < 1 or self.max_per_sequence < 0:
            raise ConfigError(
                "ridge_tokens must be at least 1 and max_per_sequence not negative; got "
                f"{self.ridge_tokens} and {self.max_per_sequence}"
            )
        if self.read_s_per_token < 0 or self.compute_s_per_token <= 0:
            raise ConfigError(
                "compute_s_per_token must be positive and read_s_per_token not negative; got "
                f"{self.compute_s_per_token} and {self.read_s_per_token}"
            )

    def with_costs(self, read_s_per_token: float, compute_s_per_token: float) -> CommitRule:
        """The rule with times measured since; what is not positive is kept as it was."""
        return replace(
            self,
            read_s_per_token=read_s_per_token if read_s_per_token > 0 else self.read_s_per_token,
            compute_s_per_token=(
                compute_s_per_token if compute_s_per_token > 0 else self.compute_s_per_token
            ),
        )

    def free_tokens(self, num_scheduled: int) -> int:
        """m*: rows that a step with `num_scheduled` others computes in the same time."""
        return max(0, int(self.ridge_tokens) - num_scheduled)

    def always(self, num_pending: int, *, num_scheduled: int, num_cached: int) -> Decision:
        """As published: m <= nt, or td < tl with tl the reads of K and V in the same step.

        `num_scheduled`: all other rows of that step: one for each sequence that decodes, prefill
        chunks, and other sequences' pending tokens. `num_cached`: tokens whose K and V it reads.
        Where reads overlap with matrix products, what stays makes no step longer; where kernels run
        one after another, by td, which is less than those reads.
        """
        compute_s = self._beyond(num_pending, num_scheduled) * self.compute_s_per_token
        load_s = num_cached * self.read_s_per_token
        return self._decision(num_pending, num_scheduled, compute_s, load_s)

    def instead(
        self,
        num_pending: int,
        *,
        num_scheduled: int,
        num_steps: float,
        spent_s: float,
        restore_s: float,
    ) -> Decision:
        """For a sequence without a free block: m <= nt, or td < tl with tl = `restore_s`, what it
        takes to bring back the sequence that would be preempted.

        td is what the repetition takes until a block is free, in about `num_steps` steps, with one
        more pending token in each. It has `spent_s` too: what it has cost all sequences since
        blocks ran out, and will cost those that go on without. One preemption would have helped
        all of them, so the total is at most about twice that of the better choice, however long it
        lasts (the ski-rental bound).
        """
        rows, j = 0.0, 0
        while j < num_steps and num_pending + j <= self.max_per_sequence:
            rows += self._beyond(num_pending + j, num_scheduled) * min(1.0, num_steps - j)
            j += 1
        compute_s = rows * self.compute_s_per_token
        decision = self._decision(num_pending, num_scheduled, spent_s + compute_s, restore_s)
        step_s = self._beyond(num_pending, num_scheduled) * self.compute_s_per_token
        return replace(decision, is_pressed=True, step_s=step_s)

    def _beyond(self, num_pending: int, num_scheduled: int) -> float:
        """Of the pending rows, those beyond the ridge."""
        return min(float(num_pending), max(0.0, num_pending + num_scheduled - self.ridge_tokens))

    def _decision(
        self, num_pending: int, num_scheduled: int, compute_s: float, load_s: float
    ) -> Decision:
        if num_pending > self.max_per_sequence:
            branch = "limit"
        elif num_pending <= self.free_tokens(num_scheduled):
            branch = "free"
        else:
            branch = "cheaper" if compute_s < load_s else "dearer"
        return Decision(branch, num_pending, num_scheduled, self.ridge_tokens, compute_s, load_s)
