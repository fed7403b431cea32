"""Where drafts come from: matches against a plain search, tenants apart, memory within bounds."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels import text_match
from penstock.workers.speculation import proposers
from penstock.workers.speculation.draft import Draft, Text
from penstock.workers.speculation.proposers import Lookup, Suffix
from penstock.workers.speculation.text_index import SEPARATOR, TextIndex

if not text_match.is_available():
    pytest.skip("the native library is not built", allow_module_level=True)

CANDIDATES = 8


def long_places(text: list[int], oldest: int, newest: list[int]) -> list[tuple[int, int]]:
    """Where the next token stood after three of the newest or more, and how many; newest first."""
    places: list[tuple[int, int]] = []
    for end in range(len(text) - 1, 0, -1):  # tokens before it match, text[end] follows
        if len(places) == CANDIDATES or end - 3 < oldest:
            break
        length = 0
        while (
            length < min(32, len(newest))
            and end - 1 - length >= oldest
            and text[end - 1 - length] == newest[-1 - length]
        ):
            length += 1
        if length >= 3:
            places.append((end, length))
    return places


def expected(text: list[int], oldest: int, newest: list[int], most: int, is_own: bool):
    """The same by looking at every place, newest first."""
    places = long_places(text, oldest, newest)
    if not places and newest:
        places = short_places(text, oldest, newest)
    if not places:
        return 0, []
    longest = max(length for _, length in places)
    ends = [end for end, length in places if length == longest]
    following = [text[end] for end in ends]
    end = max(ends, key=lambda end: following.count(text[end]))  # the first of equals: the newest
    found: list[int] = []
    whole = list(text)
    for i in range(most):
        if end + i >= len(whole):
            break
        if whole[end + i] < 0:
            break
        found.append(whole[end + i])
        if is_own:
            whole.append(found[-1])
    return longest, found


def agree(found, text: list[int], oldest: int, newest: list[int], most: int, is_own: bool) -> bool:
    """Whether `found` is what is expected; a short match may be lost to another of its hash."""
    if found == expected(text, oldest, newest, most, is_own):
        return True
    length, following = found
    return not long_places(text, oldest, newest) and (
        found == (0, [])
        or any(
            text[end - length : end] == newest[-length:] and text[end] == following[0]
            for end in range(oldest + length, len(text))
        )
    )


def short_places(text: list[int], oldest: int, newest: list[int]) -> list[tuple[int, int]]:
    """The newest place of the last two tokens, or else of the last one, that something follows."""
    for size in range(min(2, len(newest)), 0, -1):
        for end in range(len(text) - 1, oldest + size - 1, -1):
            if text[end - size : end] == newest[-size:]:
                if text[end] >= 0:
                    return [(end, size)]
                break
    return []


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 8, 50]), st.sampled_from([64, 1024]))
def test_a_match_is_that_of_a_plain_search(seed, num_ids, capacity):
    """In texts that grow, repeat themselves, and wrap around."""
    rng = random.Random(seed)
    index = TextIndex(capacity, first_capacity=32)
    text: list[int] = []
    for _ in range(rng.randint(1, 30)):
        begin = rng.randrange(len(text) + 1)
        piece = text[begin : begin + rng.randint(0, 20)] if rng.random() < 0.5 else []
        piece += [rng.randrange(num_ids) for _ in range(rng.randint(0, 6))]
        text += piece
        index.extend(array("i", piece))
        newest = array("i", text)
        most = rng.randint(1, 12)
        found = index.find(newest, most, is_own=True)
        oldest = max(0, len(text) - capacity)
        assert agree(found, text, oldest, text, most, True)


@given(st.integers(0, 2**32))
def test_earlier_answers_do_not_run_into_each_other(seed):
    rng = random.Random(seed)
    index, text = TextIndex(256, first_capacity=16), []
    for _ in range(rng.randint(1, 20)):
        answer = [rng.randrange(4) for _ in range(rng.randint(1, 30))] + [SEPARATOR]
        text += answer
        index.extend(array("i", answer))
    newest = [rng.randrange(4) for _ in range(rng.randint(0, 40))]
    found = index.find(array("i", newest), 9)
    assert agree(found, text, max(0, len(text) - 256), newest, 9, False)
    assert SEPARATOR not in found[1]


def test_few_short_matches_are_lost():
    rng, index, text, num_same = random.Random(0), TextIndex(4096), [], 0
    for _ in range(3000):
        text.append(rng.choice((rng.randrange(100), rng.randrange(10_000))))
        index.extend(array("i", text[-1:]))
        num_same += index.find(array("i", text), 4, is_own=True) == expected(text, 0, text, 4, True)
    assert num_same > 0.9 * len(text)


def test_a_text_that_repeats_itself_is_continued():
    text = Text("a", array("i", [9, 1, 2, 3, 1, 2, 3]), 1)
    proposer = Lookup()
    draft = proposer.propose(text, 8)
    assert draft == Draft((1, 2, 3, 1), "lookup", 3), "a few, before any was right"
    proposer.observe(text, draft, 4)
    assert proposer.propose(text, 8) == Draft((1, 2, 3, 1, 2, 3, 1, 2), "lookup", 3)


def test_a_text_whose_drafts_failed_is_trusted_again_after_a_while():
    proposer, text = Lookup(), Text("a", array("i", [1, 2, 3, 4] * 4), 16)
    draft = proposer.propose(text, 2)
    assert draft is not None and draft.trust == 1
    proposer.observe(text, draft, 0)
    wary = proposer.propose(text, 2)
    assert wary is not None and wary.trust == pytest.approx(2 / 3)
    text.token_ids.extend([1, 2, 3, 4] * 16)
    trusting = proposer.propose(text, 2)
    assert trusting is not None and wary.trust < trusting.trust < 1


def test_a_text_is_matched_as_it_grows_and_forgotten_at_its_end():
    proposer, text = Lookup(), Text("a", array("i", [1, 2, 3, 4, 5]), 5)
    assert proposer.propose(text, 4) is None
    text.token_ids.extend([1, 2, 3])
    draft = proposer.propose(text, 2)
    assert draft is not None and draft.token_ids == (4, 5)
    assert proposer.num_bytes > 0
    proposer.end(text)
    assert proposer.num_bytes == 0


def test_matches_must_be_longer_after_drafts_that_failed():
    proposer, text = Lookup(), Text("a", array("i", [1, 2, 3, 4] * 2), 8)
    draft = proposer.propose(text, 4)
    assert draft is not None and draft.match_length == 4
    for _ in range(4):
        proposer.observe(text, draft, 0)
    assert proposer.propose(text, 4) is None, "four tokens are no longer enough"
    proposer.observe(text, draft, 1)
    assert proposer.propose(text, 4) is not None
    for _ in range(4):
        proposer.observe(text, draft, 0)
    text.token_ids.extend([*range(100, 164), 1, 2, 3, 4])
    probe = proposer.propose(text, 4)
    assert probe is not None and len(probe.token_ids) == 1, "it is tried again, with one token"
    text.token_ids.extend([1, 2, 3, 4] * 3)
    longer = proposer.propose(text, 4)
    assert longer is not None and longer.match_length >= 6
    assert longer.trust < 0.6, "long matches say little in this text"
    proposer.observe(text, longer, 4)
    again = proposer.propose(text, 4)
    assert again is not None and longer.trust < again.trust


def ended(name: str, ids: list[int], domain: bytes = b"") -> Text:
    return Text(name, array("i", [7, *ids]), 1, domain)


def test_earlier_answers_are_proposed_within_a_domain_alone():
    proposer = Suffix()
    proposer.end(ended("a", [1, 2, 3, 4, 5, 6], b"alice"))
    for domain, is_hers in ((b"alice", True), (b"bob", False), (b"", False)):
        asked = Text(f"b{domain!r}", array("i", [8, 1, 2, 3]), 4, domain)
        draft = proposer.propose(asked, 8)
        assert (draft == Draft((4, 5, 6), "suffix", 3)) if is_hers else draft is None
    assert Suffix().propose(Text("c", array("i", [8, 1, 2, 3]), 4, b"alice"), 8) is None


def test_a_prompt_is_nobodys_earlier_answer():
    proposer = Suffix()
    proposer.end(Text("a", array("i", [1, 2, 3, 4, 5, 9]), 5))
    assert proposer.propose(Text("b", array("i", [1, 2, 3]), 3), 4) is None


def test_the_longer_match_is_proposed():
    proposer = Suffix()
    proposer.end(ended("a", [5, 1, 2, 3, 40]))
    own = Text("b", array("i", [1, 2, 3, 50, 5, 1, 2, 3]), 8)
    draft = proposer.propose(own, 1)
    assert draft == Draft((40,), "suffix", 4)
    own = Text("c", array("i", [6, 1, 2, 3, 50, 6, 1, 2, 3]), 8)
    draft = proposer.propose(own, 1)
    assert draft == Draft((50,), "lookup", 4)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(proposers, "MAX_ANSWER_BYTES", 100_000)
    monkeypatch.setattr(proposers, "ANSWER_TOKENS", 4096)
    proposer, rng = Suffix(), random.Random(0)
    for i in range(200):
        answer = [rng.randrange(1000) for _ in range(500)]
        proposer.end(ended(str(i), answer, b"%d" % (i % 9)))
        assert proposer.num_answer_bytes <= 100_000
    one = TextIndex(4096)
    for _ in range(50):
        one.extend(array("i", [rng.randrange(1000) for _ in range(900)]))
    assert one.num_bytes == 20 * 4096


def test_the_own_text_is_capped(monkeypatch):
    monkeypatch.setattr(proposers, "OWN_TOKENS", 256)
    proposer, rng = Lookup(), random.Random(0)
    text = Text("a", array("i", [rng.randrange(10**6) for _ in range(10_000)]), 10_000)
    text.token_ids.extend(text.token_ids[9_900:9_910])
    draft = proposer.propose(text, 3)
    assert draft is not None and draft.token_ids == tuple(text.token_ids[9_910:9_913])
    assert proposer.num_bytes == 20 * 256


def test_positions_begin_again_before_they_overflow(monkeypatch):
    monkeypatch.setattr("penstock.workers.speculation.text_index.LAST_POSITION", 100)
    index = TextIndex(64)
    for _ in range(30):
        index.extend(array("i", [1, 2, 3, 4, 5, 6, 7]))
    assert index.num_tokens <= 100
    assert index.find(array("i", [1, 2, 3]), 2) == (3, [4, 5])
