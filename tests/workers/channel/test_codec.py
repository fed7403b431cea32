"""Whatever a request says, and whatever an engine answers, arrives as it was sent.

The fields are read off the dataclasses, so that one which is added later must travel, too.
"""

from __future__ import annotations

import dataclasses
import types
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import (
    delta_from,
    delta_message,
    request_from,
    step_message,
    submit_message,
)
from penstock.workers.request import (
    Delta,
    FinishReason,
    FirstTokenTimes,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.workers.stats import MemoryEvent

STAYS = {
    SamplingParams: {"stop"},
    Delta: {"request_id", "engine", "is_replayed", "computes"},
}  # the ingress's own

numbers = st.floats(allow_nan=False)
logprobs = st.floats(width=32, allow_nan=False)
token_ids = st.integers(0, 2**31)
counts = st.integers(0, 2**31 - 1)
token_logprobs = st.builds(
    TokenLogprob,
    token_id=token_ids,
    logprob=logprobs,
    rank=st.integers(1, 2**31),
    top=st.lists(st.tuples(token_ids, logprobs), max_size=20).map(tuple),
)
NARROWED: dict[type, dict[str, typing.Any]] = {
    SamplingParams: {
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "logit_bias": st.lists(st.tuples(token_ids, numbers)).map(tuple),
    },
    Delta: {
        "logprobs": st.lists(token_logprobs),
        "prompt_logprobs": st.lists(token_logprobs),
    },
}


def strategy(hint):
    """Values of a type, of which the integers are counts or token ids, and no number is NaN."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        return st.one_of([strategy(each) for each in arguments])
    if kind is tuple and arguments[-1:] == (...,):
        return st.lists(strategy(arguments[0])).map(tuple)
    if kind is list:
        return st.lists(strategy(arguments[0]))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: strategy(each) for name, each in hints.items()})
    # On the wire an empty text is none.
    plain = {int: counts, float: numbers, str: st.text(min_size=1)}
    return plain[kind] if kind in plain else st.from_type(hint)


def fields_of(kind):
    """A strategy for each field that travels."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: strategy(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.name not in STAYS[kind]
    } | NARROWED[kind]


def sent(params):
    message = submit_message(Request("r", (1,), params), 7, 9)
    return request_from(pb.Submit.FromString(message.SerializeToString()), "r").params


def answered(delta):
    message = delta_message(delta, 7)
    return delta_from(pb.Delta.FromString(message.SerializeToString()), delta.request_id)


@settings(max_examples=100, deadline=None)
@given(st.builds(SamplingParams, **fields_of(SamplingParams)))
def test_params_survive_the_wire(params):
    assert sent(params) == params


@settings(max_examples=100, deadline=None)
@given(st.builds(Delta, request_id=st.just("r"), **fields_of(Delta)))
def test_deltas_survive_the_wire(delta):
    assert answered(delta) == delta


@pytest.mark.parametrize("name", fields_of(SamplingParams))
def test_each_param_travels(name):
    """A field that the wire does not know cannot pass: its value here is not the default."""
    params = SamplingParams()

    @settings(max_examples=5, deadline=None, database=None)
    @given(fields_of(SamplingParams)[name].filter(lambda value: value != getattr(params, name)))
    def check(value):
        changed = dataclasses.replace(params, **{name: value})
        assert sent(changed) == changed

    check()


@pytest.mark.parametrize("name", fields_of(Delta))
def test_each_part_of_a_delta_travels(name):
    empty = Delta("r", [])

    @settings(max_examples=5, deadline=None, database=None)
    @given(fields_of(Delta)[name].filter(lambda value: value != getattr(empty, name)))
    def check(value):
        changed = dataclasses.replace(empty, **{name: value})
        assert answered(changed) == changed

    check()


def test_stop_strings_stay_at_the_ingress():
    assert sent(SamplingParams(stop=("halt",))) == SamplingParams()


def test_requests_survive_the_wire():
    submitted = Request("r", (1, 70_000, 3), SamplingParams(), emitted_ids=(4, 2**31), priority=-2)
    wire = submit_message(submitted, 7, 9, may_decline=True).SerializeToString()
    arrived = request_from(pb.Submit.FromString(wire), "r")
    assert arrived == dataclasses.replace(submitted, may_decline=True)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_reasons_survive_the_wire(reason):
    assert answered(Delta("r", [], reason)).finish_reason is reason


def test_a_step_of_tokens_travels_in_columns():
    """What says nothing but one token; whatever says more is whole. Neither is lost or doubled."""
    pending = {
        7: Delta("a", [2**31]),
        8: Delta("b", [5], num_cached_tokens=16),  # said before, with the first token
        9: Delta("c", [5], times=FirstTokenTimes(0.5, 0.25), num_cached_tokens=16),
        10: Delta("d", [5, 6]),
        11: Delta("e", [5], FinishReason.LENGTH),
        12: Delta("f", [5], logprobs=[TokenLogprob(5, -1.0, 1)]),
        13: Delta("g", [], FinishReason.ERROR, error="overloaded"),
        14: Delta("h", [0]),
        15: Delta("i", [5], events=[MemoryEvent("preempted", 3, 40)]),
    }
    step = pb.Step.FromString(step_message(pending).SerializeToString())
    assert dict(zip(step.stream_ids, step.token_ids, strict=True)) == {7: 2**31, 8: 5, 14: 0}
    whole = {message.stream_id: message for message in step.deltas}
    assert whole.keys() == {9, 10, 11, 12, 13, 15}
    for stream_id, message in whole.items():
        assert delta_from(message, pending[stream_id].request_id) == pending[stream_id]
