"""Requests and deltas (request.py) as protobuf messages of the channel, and back.

Stop strings are not sent: only the ingress, which has the text, can check them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import (
    Delta,
    FinishReason,
    FirstTokenTimes,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.workers.structured_spec import StructuredKind, StructuredSpec

_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FROM_WIRE = {number: reason for reason, number in _TO_WIRE.items()}


def submit_message(
    request: Request, stream_id: int, expected_tokens: int, *, may_decline: bool = False
) -> pb.Submit:
    """`request` as the ingress sends it; `stream_id` names it in both directions."""
    deadline_s = request.deadline_s
    return pb.Submit(
        stream_id=stream_id,
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        emitted_ids=request.emitted_ids,
        params=_params_message(request.params),
        expected_tokens=expected_tokens,
        # Time left, not a point in time: the clocks of two machines differ.
        remaining_s=None if deadline_s is None else deadline_s - time.monotonic(),
        may_decline=may_decline,
        priority=request.priority,
    )


def request_from(submit: pb.Submit, request_id: str) -> Request:
    """The request for the engine, under `request_id`, which is unique in this worker."""
    return Request(
        request_id=request_id,
        prompt_ids=tuple(submit.prompt_ids),
        emitted_ids=tuple(submit.emitted_ids),
        params=_params_from(submit.params),
        deadline_s=(
            time.monotonic() + submit.remaining_s if submit.HasField("remaining_s") else None
        ),
        priority=submit.priority,
        may_decline=submit.may_decline,
        num_expected=submit.expected_tokens,
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
        moe_mode="" if delta.moe_mode == "exact" else delta.moe_mode,
        num_neurons=delta.num_neurons,
        num_skipped_neurons=delta.num_skipped_neurons,
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


def step_bytes(pending: Mapping[int, Delta], epoch: int) -> bytes:
    """`step_message` in the message that a worker of `epoch` sends."""
    return pb.DownMessage(epoch=epoch, step=step_message(pending)).SerializeToString()


def _is_token_only(delta: Delta) -> bool:
    """num_cached_tokens may be dropped: the first delta, which has `times`, has sent it."""
    return (
        len(delta.token_ids) == 1
        and delta.finish_reason is None
        and delta.times is None
        and not delta.logprobs
        and not delta.prompt_logprobs
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
        moe_mode=message.moe_mode or "exact",
        num_neurons=message.num_neurons,
        num_skipped_neurons=message.num_skipped_neurons,
    )


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
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias_ids=[token_id for token_id, _ in params.logit_bias],
        logit_biases=[bias for _, bias in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids,
        bad_words_ids=[pb.TokenIds(ids=word) for word in params.bad_words_ids],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured=_structured_message(params.structured),
        context_policy=params.context_policy,
        sinks=params.sinks,
        window=params.window,
        roll=params.roll,
        moe_mode=params.moe_mode,
    )


def _params_from(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.logit_bias_ids, message.logit_biases, strict=True)),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words_ids=tuple(tuple(word.ids) for word in message.bad_words_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        structured=_structured_from(message),
        context_policy=message.context_policy if message.HasField("context_policy") else None,
        sinks=message.sinks if message.HasField("sinks") else None,
        window=message.window if message.HasField("window") else None,
        roll=message.roll if message.HasField("roll") else None,
        moe_mode=message.moe_mode if message.HasField("moe_mode") else None,
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
