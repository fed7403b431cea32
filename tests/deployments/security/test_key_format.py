"""The text of keys: what is made can be read, and what was mistyped is not a key."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.security.key_format import new_key, parse_key

KEY = new_key()


def test_a_new_key_is_read_back_and_only_the_digest_of_its_secret_is_in_it() -> None:
    key = new_key()
    prefix, key_id, secret, checksum = key.text.split("_")
    assert (prefix, len(key_id), len(secret), len(checksum)) == ("psk", 8, 43, 8)
    assert key.digest == hashlib.sha256(secret.encode()).digest()
    assert parse_key(key.text) == key
    assert new_key("ci-runner").key_id == "ci-runner"
    assert len({new_key().text for _ in range(100)}) == 100


@given(st.integers(0, len(KEY.text) - 1), st.characters(codec="utf-8"))
def test_one_wrong_character_is_found(index: int, character: str) -> None:
    text = KEY.text[:index] + character + KEY.text[index + 1 :]
    assert (parse_key(text) == KEY) == (text == KEY.text)
    assert text == KEY.text or parse_key(text) is None


@given(st.text(max_size=80))
def test_other_texts_are_no_keys(text: str) -> None:
    assert parse_key(text) is None
    assert parse_key(f"psk_{text}") is None
    assert parse_key(f"{KEY.text}{text}") == (KEY if not text else None)


@given(st.integers(0, len(KEY.text) - 1))
def test_a_key_that_was_cut_is_no_key(length: int) -> None:
    assert parse_key(KEY.text[:length]) is None
