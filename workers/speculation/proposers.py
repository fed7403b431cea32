"""The proposers: `lookup` in the request's own text, and `suffix` in earlier answers as well.

Prompt lookup is Saxena's method (github.com/apoorvumang/prompt-lookup-decoding); drafts from
earlier answers are those of SuffixDecoding (arXiv 2411.04975), with hash chains instead of suffix
trees. The work of a step and the memory of a text are bounded.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, replace

from penstock.workers.speculation.draft import LONG_MATCH, Draft, Text
from penstock.workers.speculation.text_index import SEPARATOR, TextIndex

OWN_TOKENS = 1 << 17  # newest tokens of a request's own text that are searched: 2.5 MiB of index
ANSWER_TOKENS = 1 << 18  # of earlier answers in one domain: 5 MiB
MAX_ANSWER_BYTES = 64 << 20  # of the answers of all domains
MOST_MATCH = 24  # that is asked for after drafts which failed
FAILURES = 4  # in a row, after which longer matches are asked for
FIRST_TOKENS = 4  # of a draft, before any of the text was right
RECENT = 0.8  # of what was counted before, with each draft of a text
PROBE_TOKENS = 64  # without a draft; then a shorter match is tried again


@dataclass(slots=True)
class _Own:
    """What is known of one request's text."""

    index: TextIndex
    num_indexed: int = 0
    least_match: int = LONG_MATCH
    num_failures: int = 0  # in a row
    probed_at: int = 0  # tokens
    num_right: float = 0.0  # drafted tokens, of late
    num_wrong: float = 0.0  # drafts with a wrong token, of late
    seen_at: int = 0  # tokens, when a draft was verified, or its failures were half forgotten

    @property
    def trust(self) -> float:
        """The share of right ones among tokens that drafts gave, as if two had been right before:
        matches of other texts say little of one that does not repeat itself."""
        return (self.num_right + 2) / (self.num_right + self.num_wrong + 2)


class Lookup:
    """Proposes what followed the newest tokens earlier in the same prompt and answer."""

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}

    @property
    def num_bytes(self) -> int:
        """Of all indexes."""
        return sum(own.index.num_bytes for own in self._own.values())

    def propose(self, text: Text, most: int) -> Draft | None:
        own = self._up_to_date(text)
        length, token_ids = own.index.find(text.token_ids, most, is_own=True)
        return self._draft(own, text, Draft(tuple(token_ids), "lookup", length))

    def _up_to_date(self, text: Text) -> _Own:
        own = self._own.get(text.request_id)
        if own is None:
            own = self._own[text.request_id] = _Own(TextIndex(OWN_TOKENS))
        own.index.extend(text.token_ids, own.num_indexed)
        own.num_indexed = len(text.token_ids)
        return own

    def _draft(self, own: _Own, text: Text, draft: Draft) -> Draft | None:
        """`draft`, if its match is long enough for a text whose last drafts fared as they did."""
        if not draft.token_ids:
            return None
        if draft.is_by_chance:
            return draft.first(FIRST_TOKENS)
        if own.num_indexed - own.seen_at >= PROBE_TOKENS:  # it may repeat itself by now
            own.num_wrong /= 2
            own.seen_at = own.num_indexed
        if draft.match_length < own.least_match:
            if own.num_indexed - own.probed_at < PROBE_TOKENS:
                return None
            own.probed_at = own.num_indexed
            draft = draft.first(1)
        draft = replace(draft, trust=own.trust)
        return draft if own.num_right else draft.first(FIRST_TOKENS)

    def observe(self, text: Text, draft: Draft, num_accepted: int) -> None:
        own = self._own.get(text.request_id)
        if own is None or draft.is_by_chance:
            return
        own.num_right = RECENT * own.num_right + num_accepted
        own.num_wrong = RECENT * own.num_wrong + (num_accepted < len(draft.token_ids))
        own.seen_at = own.num_indexed
        own.num_failures = 0 if num_accepted else own.num_failures + 1
        if num_accepted:
            own.least_match = LONG_MATCH
        elif own.num_failures >= FAILURES:
            own.num_failures = 0
            own.least_match = min(2 * own.least_match, MOST_MATCH)
            own.probed_at = own.num_indexed

    def end(self, text: Text) -> None:
        self._own.pop(text.request_id, None)


class Suffix(Lookup):
    """As Lookup, or what followed in an earlier answer of the same domain, where more matches."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: OrderedDict[bytes, TextIndex] = OrderedDict()  # least recently used first

    @property
    def num_answer_bytes(self) -> int:
        """Of the indexes of earlier answers."""
        return sum(index.num_bytes for index in self._answers.values())

    def propose(self, text: Text, most: int) -> Draft | None:
        own = self._up_to_date(text)
        length, token_ids = own.index.find(text.token_ids, most, is_own=True)
        draft = Draft(tuple(token_ids), "lookup", length)
        answers = self._answers.get(text.domain)
        if answers is not None:
            length, token_ids = answers.find(text.token_ids, most)
            if length > draft.match_length:
                draft = Draft(tuple(token_ids), "suffix", length)
        return self._draft(own, text, draft)

    def end(self, text: Text) -> None:
        super().end(text)
        answer = text.token_ids[text.num_prompt_tokens :]
        if not answer:
            return
        answers = self._answers.setdefault(text.domain, TextIndex(ANSWER_TOKENS))
        answers.extend(answer + array("i", [SEPARATOR]))
        self._answers.move_to_end(text.domain)
        while len(self._answers) > 1 and self.num_answer_bytes > MAX_ANSWER_BYTES:
            self._answers.popitem(last=False)
