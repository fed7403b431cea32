"""The spans of one answer: the wait for admission, the worker's queue, prefill and decode.

Attributes are named by OpenTelemetry's semantic conventions for generative AI, and `penstock.*`
where these have no name. Nothing that a client wrote is among them, but the model's name.
"""

from __future__ import annotations

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.call import Call, ChatPrompt, TokenUsage
from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.request_metrics import RequestTimes
from penstock.deployments.ingress.core.tracing import (
    AnswerTrace,
    Attributes,
    SpanRecord,
    Value,
)
from penstock.workers.request import FinishReason

PROVIDER = "penstock"
MAX_NAME_CHARS = 200  # of a model that a client names, where it may have any name
GATE_WAIT, WORKER_QUEUE, PREFILL, DECODE = "gate wait", "worker queue", "prefill", "decode"
_REASONS = frozenset(reason.value for reason in FinishReason)


def add_answer(
    admission: AdmissionRequest,
    call: Call,
    model: str,
    finish: str,
    *,
    times: RequestTimes,
    usage: TokenUsage,
    now_s: float,
) -> None:
    """Add the spans of an answer that has ended to its request's trace, if it has a record.

    `model`: the name of the served one. `finish`: as for RequestMetrics.count_end.
    """
    trace, record = call.context.trace, admission.trace
    if trace is None or not trace.is_sampled or record is None:
        return
    operation = "chat" if isinstance(call.prompt, ChatPrompt) else "text_completion"
    if call.options.embeds:
        operation = "embeddings"
    about: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": (call.options.model or model)[:MAX_NAME_CHARS],
        "gen_ai.response.model": model,
        **_asked(admission),
        **_measured(times, usage),
        "penstock.request.id": admission.request_id,
        "penstock.finish": finish,
    }
    if finish in _REASONS:
        about["gen_ai.response.finish_reasons"] = (finish,)
    if record.worker:
        about["penstock.worker"] = record.worker
    error = finish if finish in CATALOGUE else None
    if error is not None:  # some front ends put it into an answer that is none of an error
        trace.fail(error)
    trace.add(
        SpanRecord(
            f"{operation} {model}",
            times.start_s,
            now_s,
            about,
            record.events,
            _phases(record, times, now_s, embeds=call.options.embeds),
            error,
        )
    )


def _asked(admission: AdmissionRequest) -> Attributes:
    """The request's parameters, as they are used."""
    params = admission.request.params
    if admission.request.embeds:
        return {}
    about: dict[str, Value] = {
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
    }
    if params.max_tokens is not None:
        about["gen_ai.request.max_tokens"] = params.max_tokens
    return about


def _measured(times: RequestTimes, usage: TokenUsage) -> Attributes:
    about: dict[str, Value] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if usage.cached_tokens:
        about["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if usage.reasoning_tokens:
        about["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    if times.first_token_s is not None:
        about["gen_ai.server.time_to_first_token"] = times.first_token_s - times.start_s
    return about


def _phases(
    record: AnswerTrace, times: RequestTimes, now_s: float, *, embeds: bool
) -> list[SpanRecord]:
    """One after the other, but that an answer whose worker was lost waits again while it decodes.

    A worker says how long its queue and prefill were, and not when: its clock is another one. They
    are put after the moment at which the request was sent, and end before the first token came.
    """
    spans = [
        SpanRecord(
            GATE_WAIT,
            wait.start_s,
            now_s if wait.end_s is None else wait.end_s,
            {"penstock.wait.reason": wait.why},
        )
        for wait in record.waits
    ]
    first_s, on_worker = times.first_token_s, times.on_worker
    if first_s is None:
        return spans
    sent_s = record.sent_before(first_s)
    if sent_s is not None and on_worker is not None:
        queued_s = min(sent_s + on_worker.queue_s, first_s)
        filled_s = min(queued_s + on_worker.prefill_s, first_s)
        spans.append(SpanRecord(WORKER_QUEUE, sent_s, queued_s))
        spans.append(SpanRecord(PREFILL, queued_s, filled_s))
    if not embeds:
        spans.append(SpanRecord(DECODE, first_s, times.last_token_s))
    return spans
