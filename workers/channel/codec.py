"""Requests and deltas (request.py) as protobuf messages of the channel, and back.

Stop strings are not sent: only the ingress, which has the text, can check them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import (
    Delta,
    FinishReason,
    FirstTokenTimes,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.workers.stats import MemoryEvent
from penstock.workers.structured_spec import StructuredKind, StructuredSpec

_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
# Fields of SamplingParams that the message has under the same name and as the same type. Of the
# others, stop strings stay at the ingress, and the rest have a form of their own.
_OWN_FORM = ("stop", "logit_bias", "bad_words_ids", "structured")
_SAME_NAME = {
    each.name: pb.SamplingParams.DESCRIPTOR.fields_by_name[each.name]
    for each in fields(SamplingParams)
    if each.name not in _OWN_FORM
}
_REPEATED = frozenset(each.name for each in fields(SamplingParams) if each.default == ())
_EVENT_FIELDS = tuple(each.name for each in fields(MemoryEvent))  # both have the same
_FROM_WIRE = {number: reason for reason, number in _TO_WIRE.items()}


def submit_message(
    request: Request, stream_id: int, expected_tokens: int, *, may_decline: bool = False
) -> pb.Submit:
    """`request` as the ingress sends it; `stream_id` names it in both directions."""
    deadline_s, wait_until_s, now_s = request.deadline_s, request.wait_until_s, time.monotonic()
    return pb.Submit(
        stream_id=stream_id,
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        emitted_ids=request.emitted_ids,
        params=_params_message(request.params),
        expected_tokens=expected_tokens,
        # Time left, not a point in time: the clocks of two machines differ.
        remaining_s=None if deadline_s is None else deadline_s - now_s,
        remaining_wait_s=None if wait_until_s is None else wait_until_s - now_s,
        may_decline=may_decline,
        priority=request.priority,
        is_continued=request.is_continued,
        cache_domain=request.cache_domain,
        embeds=request.embeds,
        adapter=request.adapter,
    )


def submit_bytes(
    request: Request,
    stream_id: int,
    expected_tokens: int,
    epoch: int,
    number: int,
    *,
    may_decline: bool = False,
) -> bytes:
    """`submit_message` in message `number` to the worker of `epoch`."""
    submit = submit_message(request, stream_id, expected_tokens, may_decline=may_decline)
    return pb.UpMessage(epoch=epoch, number=number, submit=submit).SerializeToString()


def request_from(submit: pb.Submit, request_id: str) -> Request:
    """The request for the engine, under `request_id`, which is unique in this worker."""
    now_s = time.monotonic()
    return Request(
        request_id=request_id,
        prompt_ids=tuple(submit.prompt_ids),
        emitted_ids=tuple(submit.emitted_ids),
        params=_params_from(submit.params),
        deadline_s=now_s + submit.remaining_s if submit.HasField("remaining_s") else None,
        wait_until_s=(
            now_s + submit.remaining_wait_s if submit.HasField("remaining_wait_s") else None
        ),
        priority=submit.priority,
        may_decline=submit.may_decline,
        is_continued=submit.is_continued,
        cache_domain=submit.cache_domain,
        embeds=submit.embeds,
        adapter=submit.adapter,
    )


def delta_message(delta: Delta, stream_id: int) -> pb.Delta:
    return pb.Delta(
        stream_id=stream_id,
        token_ids=delta.token_ids,
        finish_reason=_TO_WIRE[delta.finish_reason],
        stop_token_id=delta.stop_token_id,
        error=delta.error or "",
        num_cached_tokens=delta.num_cached_tokens,
        logprobs=map(_logprob_message, delta.logprobs),
        prompt_logprobs=map(_logprob_message, delta.prompt_logprobs),
        times=_times_message(delta.times),
        error_message=delta.error_message,
        error_param=delta.error_param or "",
        num_evicted_tokens=delta.num_evicted_tokens,
        num_draft_tokens=delta.num_draft_tokens,
        num_accepted_tokens=delta.num_accepted_tokens,
        moe_mode="" if delta.moe_mode == "exact" else delta.moe_mode,
        num_neurons=delta.num_neurons,
        num_skipped_neurons=delta.num_skipped_neurons,
        embedding=delta.embedding,
        events=map(_event_message, delta.events),
    )


def step_message(pending: Mapping[int, Delta]) -> pb.Step:
    """The deltas of one step, by stream id. Those of one token alone go into two packed columns."""
    step = pb.Step()
    stream_ids, token_ids = [], []
    for stream_id, delta in pending.items():
        if _is_token_only(delta):
            stream_ids.append(stream_id)
            token_ids.append(delta.token_ids[0])
        else:
            step.deltas.append(delta_message(delta, stream_id))
    step.stream_ids.extend(stream_ids)
    step.token_ids.extend(token_ids)
    return step


def step_bytes(pending: Mapping[int, Delta], epoch: int, heard: int) -> bytes:
    """`step_message` in the message that a worker of `epoch` sends; it has heard message `heard`
    of that ingress."""
    step = step_message(pending)
    return pb.DownMessage(epoch=epoch, heard=heard, step=step).SerializeToString()


def _is_token_only(delta: Delta) -> bool:
    """num_cached_tokens may be dropped: the first delta, which has `times`, has sent it. The counts
    of drafts come with the last delta at the latest."""
    return (
        len(delta.token_ids) == 1
        and delta.finish_reason is None
        and delta.times is None
        and not delta.logprobs
        and not delta.prompt_logprobs
        and not delta.events
    )


def delta_from(message: pb.Delta, request_id: str) -> Delta:
    return Delta(
        request_id=request_id,
        token_ids=list(message.token_ids),
        finish_reason=_FROM_WIRE[message.finish_reason],
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error=message.error or None,
        num_cached_tokens=message.num_cached_tokens,
        logprobs=[_logprob_from(each) for each in message.logprobs],
        prompt_logprobs=[_logprob_from(each) for each in message.prompt_logprobs],
        times=_times_from(message),
        error_message=message.error_message,
        error_param=message.error_param or None,
        num_evicted_tokens=message.num_evicted_tokens,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        moe_mode=message.moe_mode or "exact",
        num_neurons=message.num_neurons,
        num_skipped_neurons=message.num_skipped_neurons,
        embedding=message.embedding,
        events=[_event_from(each) for each in message.events],
    )


def _event_message(event: MemoryEvent) -> pb.MemoryEvent:
    return pb.MemoryEvent(**{name: getattr(event, name) for name in _EVENT_FIELDS})


def _event_from(message: pb.MemoryEvent) -> MemoryEvent:
    return MemoryEvent(**{name: getattr(message, name) for name in _EVENT_FIELDS})


def _times_message(times: FirstTokenTimes | None) -> pb.FirstTokenTimes | None:
    if times is None:
        return None
    return pb.FirstTokenTimes(queue_s=times.queue_s, prefill_s=times.prefill_s)


def _times_from(message: pb.Delta) -> FirstTokenTimes | None:
    if not message.HasField("times"):
        return None
    return FirstTokenTimes(message.times.queue_s, message.times.prefill_s)


def _params_message(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        **{name: getattr(params, name) for name in _SAME_NAME},
        logit_bias_ids=[token_id for token_id, _ in params.logit_bias],
        logit_biases=[bias for _, bias in params.logit_bias],
        bad_words_ids=[pb.TokenIds(ids=word) for word in params.bad_words_ids],
        structured=_structured_message(params.structured),
    )


def _params_from(message: pb.SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {}
    for name, descriptor in _SAME_NAME.items():
        if name in _REPEATED:
            given[name] = tuple(getattr(message, name))
        elif not descriptor.has_presence or message.HasField(name):
            given[name] = getattr(message, name)
    return SamplingParams(
        **given,
        logit_bias=tuple(zip(message.logit_bias_ids, message.logit_biases, strict=True)),
        bad_words_ids=tuple(tuple(word.ids) for word in message.bad_words_ids),
        structured=_structured_from(message),
    )


def _structured_message(spec: StructuredSpec | None) -> pb.StructuredSpec | None:
    if spec is None:
        return None
    return pb.StructuredSpec(
        kind=spec.kind.value, text=spec.text, lenient=spec.lenient, param=spec.param
    )


def _structured_from(message: pb.SamplingParams) -> StructuredSpec | None:
    if not message.HasField("structured"):
        return None
    spec = message.structured
    return StructuredSpec(
        StructuredKind(spec.kind), spec.text, lenient=spec.lenient, param=spec.param
    )


def _logprob_message(each: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=each.token_id,
        logprob=each.logprob,
        rank=each.rank,
        top_ids=[token_id for token_id, _ in each.top],
        top_logprobs=[logprob for _, logprob in each.top],
    )


def _logprob_from(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return TokenLogprob(message.token_id, message.logprob, message.rank, top)
