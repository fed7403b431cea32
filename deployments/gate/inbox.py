"""Offers that have been received and not judged yet, in the order in which their texts arrived.

Receiving is quick, judging takes a millisecond: offers gather here so that a burst of them delays
no reply. An offer is judged once the features of its text are there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from penstock.protos.penstock.internal.v1 import gate_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offered:
    """One of them."""

    ingress: str
    message: pb.Offer
    came_s: float
    epoch: int | None = None  # of the worker it is admitted to, by ticket or on credit
    is_held: bool = False  # its ledger holds it provisionally
    text: pb.TextFeatures | None = None  # None: not received yet
    complete_s: float = 0.0  # when the text was received

    @property
    def max_tokens(self) -> int | None:
        features = self.message.features
        return features.max_tokens if features.HasField("max_tokens") else None

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        left = self.message.remaining_s if self.message.HasField("remaining_s") else None
        return left is not None and self.came_s + left <= now

    def with_text(self, text: pb.TextFeatures, now: float) -> Offered:
        return replace(self, text=text, complete_s=now)


class Inbox:
    """By request_id. Those without a text are not among its length, nor in `next`."""

    def __init__(self) -> None:
        self._offers: OrderedDict[str, Offered] = OrderedDict()  # with their texts
        self._without_text: dict[str, Offered] = {}
        self.num_unheld = 0  # with a text, that no ledger holds

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._offers

    def put(self, offered: Offered) -> None:
        """Append; an earlier offer of the same request is dropped."""
        name = offered.message.request_id
        self.pop(name)
        if offered.text is None:
            self._without_text[name] = offered
        else:
            self._offers[name] = offered
            self.num_unheld += not offered.is_held

    def pop(self, request_id: str) -> Offered | None:
        """Take it out, if it is there."""
        offered = self._offers.pop(request_id, None)
        if offered is None:
            return self._without_text.pop(request_id, None)
        self.num_unheld -= not offered.is_held
        return offered

    def next(self) -> Offered | None:
        """Take the first one with a text out, if there is any."""
        return self.pop(next(iter(self._offers))) if self._offers else None

    def waits_since(self) -> float | None:
        """When the first of them was complete; None: there is none."""
        first = next(iter(self._offers.values()), None)
        return None if first is None else first.complete_s
