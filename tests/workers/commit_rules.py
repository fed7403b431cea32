"""Commit rules for tests: whether tokens wait is given, whatever it costs."""

from __future__ import annotations

from penstock.workers.scheduling.commit_rule import Decision


class GivenRule:
    """`stays(num_pending, num_scheduled)` decides, for up to `most` tokens."""

    ridge_tokens, read_s_per_token, compute_s_per_token = 1.0, 1e-6, 1e-3

    def __init__(self, stays, most):
        self._stays, self._most = stays, most

    def _decide(self, num_pending, num_scheduled):
        stays = num_pending <= self._most and self._stays(num_pending, num_scheduled)
        branch = "free" if stays else "dearer"
        return Decision(branch, num_pending, num_scheduled, self._most, 0.0, 0.0)

    def always(self, num_pending, *, num_scheduled, num_cached):
        return self._decide(num_pending, num_scheduled)

    def instead(self, num_pending, *, num_scheduled, num_steps, spent_s, restore_s):
        return self._decide(num_pending, num_scheduled)

    def with_costs(self, read_s_per_token, compute_s_per_token):
        return self


def stays_always(most):
    """Tokens wait for a block whenever they may."""
    return GivenRule(lambda num_pending, num_scheduled: True, most)


def stays_by_chance(random, most=64, share=0.8):
    """Commits when a coin says so."""
    return GivenRule(lambda num_pending, num_scheduled: random.random() < share, most)
