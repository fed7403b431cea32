from penstock.protos.penstock.internal.v1 import channel_pb2 as _channel_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromIngress(_message.Message):
    __slots__ = ("number", "ingress_id", "tokenizer_digest", "challenge", "proof", "explain", "reports", "offers", "ended", "declined", "labels", "texts", "lost")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INGRESS_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    number: int
    ingress_id: str
    tokenizer_digest: str
    challenge: _channel_pb2.Challenge
    proof: bytes
    explain: _containers.RepeatedCompositeFieldContainer[ExplainRequest]
    reports: _containers.RepeatedCompositeFieldContainer[WorkerReport]
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    ended: _containers.RepeatedCompositeFieldContainer[Ended]
    declined: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.RepeatedCompositeFieldContainer[Label]
    texts: _containers.RepeatedCompositeFieldContainer[TextFeatures]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., ingress_id: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., challenge: _Optional[_Union[_channel_pb2.Challenge, _Mapping]] = ..., proof: _Optional[bytes] = ..., explain: _Optional[_Iterable[_Union[ExplainRequest, _Mapping]]] = ..., reports: _Optional[_Iterable[_Union[WorkerReport, _Mapping]]] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., declined: _Optional[_Iterable[str]] = ..., labels: _Optional[_Iterable[_Union[Label, _Mapping]]] = ..., texts: _Optional[_Iterable[_Union[TextFeatures, _Mapping]]] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("address", "epoch", "report")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    address: str
    epoch: int
    report: _channel_pb2.Report
    def __init__(self, address: _Optional[str] = ..., epoch: _Optional[int] = ..., report: _Optional[_Union[_channel_pb2.Report, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("request_id", "features", "priority", "remaining_s", "ceiling", "credit_epoch", "prefix", "generated", "weight")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    CEILING_FIELD_NUMBER: _ClassVar[int]
    CREDIT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    features: Features
    priority: int
    remaining_s: float
    ceiling: int
    credit_epoch: int
    prefix: _containers.RepeatedScalarFieldContainer[int]
    generated: int
    weight: float
    def __init__(self, request_id: _Optional[str] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., priority: _Optional[int] = ..., remaining_s: _Optional[float] = ..., ceiling: _Optional[int] = ..., credit_epoch: _Optional[int] = ..., prefix: _Optional[_Iterable[int]] = ..., generated: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class TextFeatures(_message.Message):
    __slots__ = ("request_id", "keys", "facts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    keys: bytes
    facts: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., keys: _Optional[bytes] = ..., facts: _Optional[_Iterable[float]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request_id", "generated")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generated: int
    def __init__(self, request_id: _Optional[str] = ..., generated: _Optional[int] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("features", "length", "ended", "request_id")
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    features: Features
    length: int
    ended: str
    request_id: str
    def __init__(self, features: _Optional[_Union[Features, _Mapping]] = ..., length: _Optional[int] = ..., ended: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("model", "tenant", "template", "prompt_tokens", "max_tokens", "min_tokens", "temperature", "top_p", "ignore_eos", "num_stop", "structured", "num_messages", "has_tools", "text_keys", "text_facts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_STOP_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    NUM_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HAS_TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEXT_KEYS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FACTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    template: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    ignore_eos: bool
    num_stop: int
    structured: bool
    num_messages: int
    has_tools: bool
    text_keys: bytes
    text_facts: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., template: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., ignore_eos: _Optional[bool] = ..., num_stop: _Optional[int] = ..., structured: _Optional[bool] = ..., num_messages: _Optional[int] = ..., has_tools: _Optional[bool] = ..., text_keys: _Optional[bytes] = ..., text_facts: _Optional[_Iterable[float]] = ...) -> None: ...

class ToIngress(_message.Message):
    __slots__ = ("queued", "tickets", "refusals", "expired", "credits", "figures", "challenge", "proof", "explained")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EXPLAINED_FIELD_NUMBER: _ClassVar[int]
    queued: _containers.RepeatedScalarFieldContainer[str]
    tickets: _containers.RepeatedCompositeFieldContainer[Ticket]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    expired: _containers.RepeatedScalarFieldContainer[str]
    credits: Credits
    figures: Figures
    challenge: _channel_pb2.Challenge
    proof: bytes
    explained: _containers.RepeatedCompositeFieldContainer[ExplainResponse]
    def __init__(self, queued: _Optional[_Iterable[str]] = ..., tickets: _Optional[_Iterable[_Union[Ticket, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., expired: _Optional[_Iterable[str]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., figures: _Optional[_Union[Figures, _Mapping]] = ..., challenge: _Optional[_Union[_channel_pb2.Challenge, _Mapping]] = ..., proof: _Optional[bytes] = ..., explained: _Optional[_Iterable[_Union[ExplainResponse, _Mapping]]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("request_id", "reason", "message", "retry_after_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    message: str
    retry_after_s: float
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Credits(_message.Message):
    __slots__ = ("as_of", "epochs", "tokens", "slots")
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    as_of: int
    epochs: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, as_of: _Optional[int] = ..., epochs: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("epoch", "num_waiting", "num_admitted", "num_expired", "num_declined", "num_refused", "num_learnt", "levels", "coverage", "num_waits", "predicted_wait_s", "actual_wait_s", "wait_error_s", "num_preemptions", "num_completed", "retry_after_factor", "num_retry_after_in_time", "num_retry_after_late", "snapshot_fault")
    class NumRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_DECLINED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEARNT_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FACTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRY_AFTER_IN_TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRY_AFTER_LATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FAULT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_waiting: int
    num_admitted: int
    num_expired: int
    num_declined: int
    num_refused: _containers.ScalarMap[str, int]
    num_learnt: int
    levels: _containers.RepeatedScalarFieldContainer[float]
    coverage: _containers.RepeatedScalarFieldContainer[float]
    num_waits: int
    predicted_wait_s: float
    actual_wait_s: float
    wait_error_s: float
    num_preemptions: int
    num_completed: int
    retry_after_factor: float
    num_retry_after_in_time: int
    num_retry_after_late: int
    snapshot_fault: str
    def __init__(self, epoch: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_admitted: _Optional[int] = ..., num_expired: _Optional[int] = ..., num_declined: _Optional[int] = ..., num_refused: _Optional[_Mapping[str, int]] = ..., num_learnt: _Optional[int] = ..., levels: _Optional[_Iterable[float]] = ..., coverage: _Optional[_Iterable[float]] = ..., num_waits: _Optional[int] = ..., predicted_wait_s: _Optional[float] = ..., actual_wait_s: _Optional[float] = ..., wait_error_s: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., num_completed: _Optional[int] = ..., retry_after_factor: _Optional[float] = ..., num_retry_after_in_time: _Optional[int] = ..., num_retry_after_late: _Optional[int] = ..., snapshot_fault: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("limit", "number")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    number: int
    def __init__(self, limit: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("number", "waits", "workers", "num_waiting")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    number: int
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAccount]
    num_waiting: int
    def __init__(self, number: _Optional[int] = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerAccount, _Mapping]]] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("request_id", "tenant", "reason", "waited_s", "expected_s", "worker", "peak", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    reason: str
    waited_s: float
    expected_s: float
    worker: str
    peak: int
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., reason: _Optional[str] = ..., waited_s: _Optional[float] = ..., expected_s: _Optional[float] = ..., worker: _Optional[str] = ..., peak: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class WorkerAccount(_message.Message):
    __slots__ = ("worker", "num_held", "slots", "used", "capacity", "headroom", "is_open")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_held: int
    slots: int
    used: int
    capacity: int
    headroom: float
    is_open: bool
    def __init__(self, worker: _Optional[str] = ..., num_held: _Optional[int] = ..., slots: _Optional[int] = ..., used: _Optional[int] = ..., capacity: _Optional[int] = ..., headroom: _Optional[float] = ..., is_open: _Optional[bool] = ...) -> None: ...
