from penstock.protos.penstock.internal.v1 import channel_pb2 as _channel_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallHead(_message.Message):
    __slots__ = ("version", "route", "body", "principal", "client_id", "created_s", "seed", "wants_timings", "ttl_s", "before", "key_id", "deadline_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WANTS_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    route: str
    body: bytes
    principal: str
    client_id: str
    created_s: int
    seed: int
    wants_timings: bool
    ttl_s: float
    before: bytes
    key_id: str
    deadline_s: float
    def __init__(self, version: _Optional[int] = ..., route: _Optional[str] = ..., body: _Optional[bytes] = ..., principal: _Optional[str] = ..., client_id: _Optional[str] = ..., created_s: _Optional[int] = ..., seed: _Optional[int] = ..., wants_timings: _Optional[bool] = ..., ttl_s: _Optional[float] = ..., before: _Optional[bytes] = ..., key_id: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class CallRecord(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CallEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[CallEntry, _Mapping]]] = ...) -> None: ...

class CallEntry(_message.Message):
    __slots__ = ("request_id", "delta", "ended_s", "computes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    delta: _channel_pb2.Delta
    ended_s: int
    computes: str
    def __init__(self, request_id: _Optional[str] = ..., delta: _Optional[_Union[_channel_pb2.Delta, _Mapping]] = ..., ended_s: _Optional[int] = ..., computes: _Optional[str] = ...) -> None: ...
