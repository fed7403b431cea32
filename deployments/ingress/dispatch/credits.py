"""Admission credits: tokens and slots per worker that need no round trip to the gate.

The gate renews them many times a second; what was admitted on credit since it last counted is
subtracted here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.call import MAX_PRIORITY

FRESH_S = 1.0  # older credits are void: the gate is silent
MARGIN = 64  # tokens, for the empty part of blocks


@dataclass(slots=True)
class Credits:
    """Tokens and slots by worker, keyed by its epoch."""

    _given: dict[int, tuple[int, int]] = field(default_factory=dict)
    _given_at: float = 0.0
    _used: deque[tuple[int, int, int]] = field(default_factory=deque)  # message, epoch, tokens

    @property
    def has_any(self) -> bool:
        """Whether the newest message of the gate gave any."""
        return bool(self._given)

    def renew(self, as_of: int, given: dict[int, tuple[int, int]], now: float) -> None:
        """New credits, which count all messages up to `as_of`."""
        while self._used and self._used[0][0] <= as_of:
            self._used.popleft()
        self._given, self._given_at = given, now
        for _, epoch, tokens in self._used:
            self._spend(epoch, tokens)

    def take(
        self, request: AdmissionRequest, epochs: Sequence[int], number: int, now: float
    ) -> int | None:
        """The first of `epochs` with enough credit; message `number` will report its use.

        None for the lowest priority, too: the gate keeps room free for other requests.
        """
        limit = request.features.max_tokens
        if now - self._given_at > FRESH_S or limit is None:
            return None
        if request.request.priority >= MAX_PRIORITY:
            return None
        tokens = request.features.prompt_tokens + limit
        if request.ceiling is not None:
            tokens = min(tokens, request.ceiling)
        tokens += MARGIN
        for epoch in epochs:
            left, slots = self._given.get(epoch, (0, 0))
            if slots >= 1 and tokens <= left:
                self._used.append((number, epoch, tokens))
                self._spend(epoch, tokens)
                return epoch
        return None

    def drop(self, epoch: int) -> None:
        """That worker is gone."""
        self._given.pop(epoch, None)

    def _spend(self, epoch: int, tokens: int) -> None:
        if epoch in self._given:
            left, slots = self._given[epoch]
            self._given[epoch] = (left - tokens, slots - 1)
