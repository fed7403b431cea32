"""What the client of one call has received: written into event ids, and skipped on resumption.

A position is a number of tokens, not of events: how tokens share an event depends on timing.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.deployments.ingress.core.call import TextDelta
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.workers.request import RequestError

_EVENT_ID = re.compile(
    r"([0-9a-f]{1,64})/(\d{1,9}e?\.[0-9a-f]{8}(?:-\d{1,9}e?\.[0-9a-f]{8}){0,1023})(?::(\d{1,9}))?"
)


@dataclass(frozen=True, slots=True)
class Received:
    """What a client has of one answer. `checksum`: of its token ids; None: not known."""

    num_tokens: int = 0
    has_ended: bool = False
    checksum: int | None = None


def checksum_of(token_ids: Iterable[int], before: int = 0) -> int:
    """CRC-32 of token ids as 32-bit integers. `before`: checksum of the tokens before them."""
    return zlib.crc32(array("i", token_ids).tobytes(), before)


def parse_event_id(text: str) -> tuple[str, tuple[Received, ...], int]:
    """The call's id, what the client has of each answer, and the number of the event; -1: the
    events of this stream have no numbers. Raises RequestError."""
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        raise RequestError(
            "Last-Event-ID must be the id of an event of this stream, unchanged",
            param="Last-Event-ID",
        )
    received = []
    for each in match[2].split("-"):
        number, _, checksum = each.partition(".")
        received.append(
            Received(int(number.removesuffix("e")), number.endswith("e"), int(checksum, 16))
        )
    return match[1], tuple(received), -1 if match[3] is None else int(match[3])


class Delivery:
    """Counts what one client has received of each answer, and skips what it had received before."""

    def __init__(self, call_id: str, num_answers: int, before: tuple[Received, ...] = ()):
        """`before`: what the client has of the first answers; it has nothing of the others.

        Raises RequestError if there are more of them than answers.
        """
        if len(before) > num_answers:
            raise RequestError(
                f"this call has {num_answers} answers, and positions of {len(before)} were given",
                param="Last-Event-ID",
            )
        self._call_id = call_id
        self._before = (*before, *(Received() for _ in range(num_answers - len(before))))
        self._nums = [0] * num_answers
        self._ended = [False] * num_answers
        self._checksums = [0] * num_answers

    def is_new(self, index: int, piece: TextDelta) -> bool:
        """Count `piece` of answer `index`; whether the client does not have it yet.

        Raises ServiceError resume_mismatch if the client has other tokens.
        """
        before, was = self._before[index], self._nums[index]
        now = self._nums[index] = was + len(piece.token_ids)
        self._checksums[index] = checksum_of(piece.token_ids, self._checksums[index])
        self._ended[index] = piece.finish_reason is not None
        is_known = was < before.num_tokens or before.has_ended
        if is_known and (now >= before.num_tokens or self._ended[index]):
            is_same = before.checksum in (None, self._checksums[index])
            if now != before.num_tokens or not is_same:
                raise ServiceError("resume_mismatch")
        return not is_known

    def has_begun(self, index: int) -> bool:
        """Whether the client had something of answer `index` before."""
        return self._before[index].num_tokens > 0 or self._before[index].has_ended

    @property
    def had_all_ends(self) -> bool:
        """Whether the client had the end of every answer before."""
        return all(each.has_ended for each in self._before)

    def event_id(self, number: int | None = None) -> str:
        """Names the event after which the client has all that was counted; where events are
        numbered, up to this number of them."""
        answers = zip(self._nums, self._ended, self._checksums)
        marks = (f"{num}{'e' if ended else ''}.{crc:08x}" for num, ended, crc in answers)
        suffix = "" if number is None else f":{number}"
        return f"{self._call_id}/{'-'.join(marks)}{suffix}"
