"""Offers that have been received and not judged yet, in their order of arrival.

Receiving is quick, judging takes a millisecond: offers gather here so that a burst of them delays
no reply.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.protos.penstock.internal.v1 import gate_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offered:
    """One of them."""

    ingress: str
    message: pb.Offer
    came_s: float
    epoch: int | None = None  # of the worker it is admitted to, by ticket or on credit
    is_held: bool = False  # its ledger holds it provisionally


class Inbox:
    """By request_id."""

    def __init__(self) -> None:
        self._offers: OrderedDict[str, Offered] = OrderedDict()
        self.num_unheld = 0  # that no ledger holds

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._offers

    def put(self, offered: Offered) -> None:
        """Append; an earlier offer of the same request is dropped."""
        self.pop(offered.message.request_id)
        self._offers[offered.message.request_id] = offered
        self.num_unheld += not offered.is_held

    def pop(self, request_id: str) -> Offered | None:
        """Take it out, if it is there."""
        offered = self._offers.pop(request_id, None)
        if offered is not None:
            self.num_unheld -= not offered.is_held
        return offered

    def next(self) -> Offered | None:
        """Take the first one out, if there is any."""
        return self.pop(next(iter(self._offers))) if self._offers else None

    def waits_since(self) -> float | None:
        """When the first of them came, on the clock of `came_s`; None: there is none."""
        first = next(iter(self._offers.values()), None)
        return None if first is None else first.came_s
