"""Pieces of an answer as messages of penstock.v1.

Made for every token, so a field that has nothing to say costs nothing. Knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from penstock.deployments.calls import TextDelta, Usage
from penstock.deployments.scores import ScoredToken
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.workers.request import FinishReason

AnswerT = TypeVar("AnswerT", pb.GenerateResponse, pb.ChatResponse)

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_PHASES = [field.name for field in pb.Timings.DESCRIPTOR.fields]


def answer_message(kind: type[AnswerT], choice: int, piece: TextDelta) -> AnswerT:
    """All of `piece` but its usage, which is that of the whole call."""
    answer = kind(text=piece.text, token_ids=piece.token_ids, choice=choice)
    if piece.scores:
        answer.logprobs.extend(map(_logprob, piece.scores))
    if piece.prompt_scores:
        answer.prompt_logprobs.extend(map(_logprob, piece.prompt_scores))
    if piece.reasoning:
        assert isinstance(answer, pb.ChatResponse), "only conversations have it apart"
        answer.reasoning = piece.reasoning
    if piece.tool_calls:
        assert isinstance(answer, pb.ChatResponse), "only conversations have tools"
        for call in piece.tool_calls:
            answer.tool_calls.add(
                index=call.index,
                id=call.call_id or "",
                name=call.name or "",
                arguments=call.arguments,
            )
    if piece.finish_reason is not None:
        ends_in_calls = piece.ends_in_tool_calls
        reason = pb.FINISH_REASON_TOOL_CALLS if ends_in_calls else _FINISH[piece.finish_reason]
        answer.finish_reason = reason
    return answer


def usage_message(usages: Sequence[Usage]) -> pb.Usage:
    """What all answers of a call used."""
    total = Usage.total(usages)
    message = pb.Usage(
        prompt_tokens=total.prompt_tokens,
        completion_tokens=total.completion_tokens,
        cached_tokens=total.cached_tokens,
        evicted_tokens=total.evicted_tokens,
        reasoning_tokens=total.reasoning_tokens,
        moe_mode=total.moe_mode,
        neurons=total.neurons,
        skipped_neurons=total.skipped_neurons,
    )
    timings = [usage.timings for usage in usages if usage.timings is not None]
    if timings:
        message.timings.SetInParent()
    for name in _PHASES:
        known = [seconds for each in timings if (seconds := getattr(each, name)) is not None]
        if known:
            setattr(message.timings, name, round(max(known), 6))
    return message


def _logprob(score: ScoredToken) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=score.token_id,
        logprob=score.logprob,
        token=score.spelling,
        rank=score.rank,
        top=[
            pb.TopLogprob(token_id=each.token_id, logprob=each.logprob, token=each.spelling)
            for each in score.top
        ],
    )
