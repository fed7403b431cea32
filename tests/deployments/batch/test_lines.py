"""The input of a batch: what is accepted, and what a refusal names."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.batch.lines import (
    MAX_LINE_BYTES,
    MAX_PROBLEMS_KEPT,
    InputError,
    check_input,
    read_lines,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def text_of(*lines):
    return b"\n".join(
        each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines
    )


def problems_of(*lines, **options):
    with pytest.raises(InputError) as refused:
        check_input(io.BytesIO(text_of(*lines)), **options)
    return [(each.line, each.param, each.code) for each in refused.value.problems]


def test_blank_lines_a_bom_and_a_missing_last_line_break_are_accepted():
    other = {**GOOD, "custom_id": "b"}
    content = b"\xef\xbb\xbf" + text_of(GOOD, b"", b"  \t", other)
    file = io.BytesIO(content)
    summary = check_input(file)
    assert summary.num_lines == 2
    assert summary.num_bytes == len(content)
    assert summary.sha256 == hashlib.sha256(content).hexdigest()
    assert [(each.number, each.custom_id) for each in read_lines(file)] == [(1, "a"), (4, "b")]
    assert [each.number for each in read_lines(file, {1})] == [4]


def test_windows_line_breaks_are_accepted():
    file = io.BytesIO(text_of(GOOD, {**GOOD, "custom_id": "b"}).replace(b"\n", b"\r\n"))
    assert check_input(file).num_lines == 2


@pytest.mark.parametrize(
    ("line", "param", "code"),
    [
        (b"{", None, "invalid_json_line"),
        (b"[]", None, "invalid_json_line"),
        (b"\xff\xfe", None, "invalid_json_line"),
        (b'{"custom_id": NaN}', None, "invalid_json_line"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "custom_id", None),
        ({**GOOD, "custom_id": 3}, "custom_id", "invalid_value"),
        ({**GOOD, "custom_id": ""}, "custom_id", "invalid_value"),
        ({**GOOD, "custom_id": "x" * 513}, "custom_id", "invalid_value"),
        ({**GOOD, "method": "GET"}, "method", "invalid_method"),
        ({**GOOD, "url": "/v1/score"}, "url", "invalid_url"),
        ({**GOOD, "url": ["/v1/completions"]}, "url", "invalid_url"),
        ({**GOOD, "body": "x"}, "body", "invalid_value"),
        ({**GOOD, "body": {"stream": True}}, "body.stream", "invalid_value"),
        ({**GOOD, "body": {"background": True}}, "body.background", "invalid_value"),
        ({**GOOD, "extra": 1}, "extra", "unknown_parameter"),
    ],
)
def test_a_refusal_names_the_line_and_the_field(line, param, code):
    code = code or "missing_required_parameter"
    assert problems_of({**GOOD, "custom_id": "first"}, b"", line) == [(3, param, code)]


def test_a_second_line_with_the_same_custom_id_is_refused_and_the_first_is_named():
    with pytest.raises(InputError, match="line 3: custom_id 'a' is that of line 1 too"):
        check_input(io.BytesIO(text_of(GOOD, {**GOOD, "custom_id": "b"}, GOOD)))


def test_all_problems_are_counted_and_the_first_are_kept():
    with pytest.raises(InputError) as refused:
        check_input(io.BytesIO(text_of(*[b"{"] * 200)))
    assert refused.value.num_problems == 200
    assert len(refused.value.problems) == MAX_PROBLEMS_KEPT


def test_limits_of_the_whole_file():
    assert problems_of(b"") == [(None, None, "empty_file")]
    lines = [{**GOOD, "custom_id": str(i)} for i in range(3)]
    assert problems_of(*lines, max_lines=2) == [(None, None, "too_many_lines")]
    assert problems_of(*lines, max_bytes=20) == [(None, None, "file_too_large")]


def test_a_line_that_is_too_long_is_refused_and_the_lines_after_it_keep_their_numbers():
    huge = {**GOOD, "body": {"prompt": "x" * MAX_LINE_BYTES}}
    assert problems_of(huge, b"{") == [(1, None, "line_too_large"), (2, None, "invalid_json_line")]


def test_the_endpoint_and_the_model_of_each_line_are_checked():
    chat = {**GOOD, "url": "/v1/chat/completions"}
    assert problems_of(chat, endpoint="/v1/completions") == [(1, "url", "invalid_url")]
    named = {**GOOD, "body": {"model": "gpt-x", "prompt": "x"}}
    assert problems_of(named, models=["builtin"]) == [(1, "body.model", "model_not_found")]
    assert check_input(io.BytesIO(text_of(named)), models=["gpt-x"]).num_lines == 1
    assert check_input(io.BytesIO(text_of(GOOD)), models=["gpt-x"]).num_lines == 1


@given(st.binary(max_size=300))
def test_any_bytes_are_either_refused_or_read(content):
    file = io.BytesIO(content)
    num_lines = None
    with contextlib.suppress(InputError):
        num_lines = check_input(file).num_lines
    if num_lines is not None:
        assert len(list(read_lines(file))) == num_lines


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.sampled_from(list(GOOD)), JSON)
def test_any_value_of_any_field_is_either_refused_by_its_name_or_read(field, value):
    file = io.BytesIO(text_of({**GOOD, field: value}))
    problems = []
    try:
        check_input(file)
    except InputError as error:
        problems = error.problems
    if not problems:
        assert len(list(read_lines(file))) == 1
    assert all((problem.param or "").startswith(field) for problem in problems)
