"""One hostile corpus for every front end, the front ends as it speaks to them, and good traffic.

`VALUES` are requests with one thing wrong, in the words of the Python client; each front end says
them in its own. `RAW` are bytes. A refusal must be the one expected, under the status that the
catalogue has for it; and requests served meanwhile get what they get alone.
"""

from __future__ import annotations

import json
import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.grpc import inference, open_inference
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.penstock.v1 import inference_pb2 as pb

TIMEOUT_S = 120
TEXT = "It was a bright morning, and"
MESSAGES = [{"role": "user", "content": TEXT}]
NAN, INFINITY = float("nan"), float("inf")
FAR = 2**31 - 1  # an id that no vocabulary has
DEEP_SCHEMA = '{"items":' * 10_000 + "{}" + "}" * 10_000
HTTP = ("http completions", "http chat")
CHATS = ("http chat", "grpc chat")
GENERATES = ("http completions", "grpc generate")


@dataclass(frozen=True)
class Value:
    """A request that is refused: `fields` on top of a good one, and the field that is named.

    `http` is the code where JSON cannot even say it. `on`: the front ends that have the field.
    With `code` None it looks as bad, but is served.
    """

    fields: Mapping[str, Any]
    param: str
    code: str | None = "invalid_value"
    http: str | None = None
    on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raw:
    """Bytes instead of a request. Without `code` they are served, as if they were a good one."""

    body: bytes
    code: str | None
    param: str | None = None
    status: str | int | None = None  # where the transport refuses by itself, without a code


@dataclass(frozen=True)
class Reply:
    """How a request ended. `ids` or text of the answer, if it was served."""

    status: int | str
    code: str | None = None
    param: str | None = None
    words: str = ""
    answer: Any = None


def number(name: str, *values: float, **options: Any) -> dict[str, Value]:
    return {f"{name} {value:g}": Value({name: value}, name, **options) for value in values}


def no_number(name: str) -> dict[str, Value]:
    return number(name, NAN, INFINITY, -INFINITY, http="invalid_json")


VALUES: dict[str, Value] = {
    **number("temperature", -0.1, 1e308),
    **number("top_p", 0.0, -1.0, 1.5),
    **number("min_p", -0.1, 1.5),
    **number("top_k", -2),  # -1 is how some clients say 0
    **number("max_tokens", -1, -(2**31)),
    **number("max_tokens", FAR, code="context_length_exceeded"),
    **number("min_tokens", -1, FAR),
    **number("repetition_penalty", 0.0, 5e-324, -1.0, 1e6),
    **number("presence_penalty", -2.5, 1e30),
    **number("frequency_penalty", 2.5, -1e30),
    **number("n", 0, -1, 9, FAR),
    **number("truncate_prompt_tokens", 0, -5),
    **number("logprobs", -1, 21, FAR, on=GENERATES),
    **number("prompt_logprobs", -1, 21),
    **{
        key: value
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        for key, value in no_number(name).items()
    },
    "17 stop strings": Value({"stop": ["x"] * 17}, "stop", on=(*CHATS, *GENERATES)),
    "300,000 stop strings": Value({"stop": [""] * 300_000}, "stop", on=(*CHATS, *GENERATES)),
    "an empty stop string": Value({"stop": [""]}, "stop"),
    "a long stop string": Value({"stop": ["x" * 257]}, "stop"),
    "a stop id beyond": Value({"stop_token_ids": [FAR]}, "stop_token_ids"),
    "a negative stop id": Value({"stop_token_ids": [-1]}, "stop_token_ids"),
    "129 stop ids": Value({"stop_token_ids": [5] * 129}, "stop_token_ids"),
    "a biased id beyond": Value({"logit_bias": {FAR: 1.0}}, "logit_bias"),
    "a negative biased id": Value({"logit_bias": {-1: 1.0}}, "logit_bias"),
    "an endless bias": Value({"logit_bias": {5: INFINITY}}, "logit_bias", http="invalid_json"),
    "a bias of NaN": Value({"logit_bias": {5: NAN}}, "logit_bias", http="invalid_json"),
    "1025 biases": Value({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    "an allowed id beyond": Value({"allowed_token_ids": [FAR]}, "allowed_token_ids"),
    "300,000 allowed ids": Value({"allowed_token_ids": [5] * 300_000}, "allowed_token_ids"),
    "65 bad words": Value({"bad_words": ["mill"] * 65}, "bad_words"),
    "a bad word of spaces": Value({"bad_words": ["  "]}, "bad_words"),
    "a long bad word": Value({"bad_words": ["x" * 257]}, "bad_words"),
    "another model": Value({"model": "../../etc/passwd"}, "model", "model_not_found"),
    "a model of 10,000 letters": Value({"model": "m" * 10_000}, "model", "model_not_found"),
    "no prompt": Value({"prompt": []}, "prompt", on=GENERATES),
    "a prompt id beyond": Value({"prompt": [5, FAR]}, "prompt", on=GENERATES),
    "a negative prompt id": Value({"prompt": [-1, 5]}, "prompt", on=GENERATES),
    "300,000 ids": Value(
        {"prompt": [5] * 300_000}, "prompt", "context_length_exceeded", on=GENERATES
    ),
    "600,000 letters": Value(
        {"prompt": "a " * 300_000}, "prompt", "context_length_exceeded", on=(*GENERATES, "oip")
    ),
    "a schema 10,000 deep": Value({"json_schema": DEEP_SCHEMA}, "json_schema"),
    "half a schema": Value({"json_schema": "{" * 10}, "json_schema"),
    "a schema that is a list": Value({"json_schema": "[1]"}, "json_schema"),
    "a schema of 70,000 letters": Value(
        {"json_schema": json.dumps({"title": "x" * 70_000})}, "json_schema"
    ),
    "a schema that fetches": Value({"json_schema": '{"$ref": "http://a/"}'}, "json_schema"),
    "a regex of too many states": Value({"regex": "(a|b|ab)*" * 500}, "regex"),
    "a regex of repeated repeats": Value(
        {"regex": "((a{1,99}){1,99}){1,99}b{9999}"}, "regex", code=None
    ),
    "a regex that backtracks": Value({"regex": "((a+)+)+$"}, "regex", code=None),
    "a regex 10,000 deep": Value({"regex": "(" * 4000 + "a" + ")" * 4000}, "regex"),
    "a regex that looks around": Value({"regex": "(?=a)a"}, "regex"),
    "a regex that refers back": Value({"regex": r"(a)\1"}, "regex"),
    "half a regex": Value({"regex": "["}, "regex"),
    "no choice": Value({"choice": []}, "choice"),
    "1025 choices": Value({"choice": [str(i) for i in range(1025)]}, "choice"),
    "half a grammar": Value({"grammar": "start: ("}, "grammar"),
    "a grammar of itself": Value({"grammar": "start: start"}, "grammar"),
    "NUL in a grammar": Value({"grammar": 'start: "a\0"'}, "grammar"),
}  # fmt: skip

_GOOD: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
_ANSWER_OF_TEXT = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(**_GOOD))


def _field(number: int, wire_type: int, content: bytes = b"") -> bytes:
    key, out = number << 3 | wire_type, bytearray()
    while key > 0x7F:
        out.append(key & 0x7F | 0x80)
        key >>= 7
    return bytes([*out, key]) + content


_UNKNOWN = _field(1000, 0, b"\x2a") + _field(1001, 2, b"\x05\xff\xfe\x00\x01\x02")
_BROKEN = {
    "no message": Raw(b"\xff\xff\xff", "invalid_message"),
    "groups 10,000 deep": Raw(_field(1000, 3) * 10_000, "invalid_message"),
    "a group that never began": Raw(_field(1000, 4), "invalid_message"),
    "a field of number 0": Raw(b"\x00\x00", "invalid_message"),
}


def _grpc(good: bytes, text: bytes) -> dict[str, Raw]:
    """Raw cases around a good message; `text` is a string field that is not UTF-8."""
    return {
        **_BROKEN,
        "not UTF-8": Raw(good + text, "invalid_message"),
        "half a message": Raw(good[:-1], "invalid_message"),
        "a length beyond the end": Raw(
            good + _field(1001, 2, b"\xff\xff\xff\x07"), "invalid_message"
        ),
        "a body of 4 MiB and one": Raw(
            good + _field(1001, 2, b"\x80\x80\x80\x02" + bytes(MAX_BODY_BYTES)),
            None,
            status="RESOURCE_EXHAUSTED",
        ),
        "unknown fields": Raw(_UNKNOWN + good + _UNKNOWN, None),
    }  # fmt: skip


def _json(**fields: Any) -> bytes:
    return json.dumps({**_GOOD, **fields}).encode()


def _http(**good: Any) -> dict[str, Raw]:
    name, value = next(iter(good.items()))
    part = json.dumps(value).encode()
    return {
        "nothing": Raw(b"", "invalid_json"),
        "half a body": Raw(b'{"%s": [' % name.encode(), "invalid_json"),
        "a list": Raw(b"[1]", "invalid_json"),
        "lists 100,000 deep": Raw(b"[" * 100_000, "invalid_json"),
        "a schema 10,000 deep as JSON": Raw(
            b'{"%s": %s, "guided_json": %s}' % (name.encode(), part, DEEP_SCHEMA.encode()),
            "invalid_json",
        ),
        "not UTF-8": Raw(b'{"%s": "\xff\xfe"}' % name.encode(), "invalid_json"),
        "half a surrogate pair": Raw(b'{"%s": "\\ud800"}' % name.encode(), "invalid_json"),
        "empty body": Raw(b"{}", "missing_parameter", name),
        "an unknown field": Raw(_json(**good, mood=1), "unknown_parameter", "mood"),
        "a number of 4,000 digits": Raw(
            b'{"%s": %s, "seed": %s}' % (name.encode(), part, b"9" * 4000), "invalid_value", "seed"
        ),
        "a number beyond 64 bits": Raw(_json(**good, seed=2**63), "invalid_value", "seed"),
        "a body of 4 MiB and one": Raw(b" " * (MAX_BODY_BYTES + 1), "request_too_large"),
    }


def _infer(texts: list[bytes], **changed: Any) -> bytes:
    tensor = oip.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=changed.pop("shape", [len(texts)])
    )
    if "raw_input_contents" not in changed:
        tensor.contents.bytes_contents.extend(texts)
    request = oip.ModelInferRequest(model_name="builtin", inputs=[tensor], **changed)
    for name, value in _GOOD.items():
        request.parameters[name].CopyFrom(_parameter(value))
    return request.SerializeToString()


def _parameter(value: Any) -> oip.InferParameter:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    if type(value) not in kinds:
        value = json.dumps(value)
    return oip.InferParameter(**{kinds[type(value)]: value})


_MANY_EMPTY = b"\x12\x00" * (2**21 - 8)  # as many empty messages of a conversation as fit
RAW: dict[str, dict[str, Raw]] = {
    "http completions": _http(prompt=TEXT),
    "http chat": _http(messages=MESSAGES),
    "grpc generate": _grpc(_ANSWER_OF_TEXT.SerializeToString(), b"\x12\x02\xff\xfe"),
    "grpc chat": {
        **_grpc(
            pb.ChatRequest(
                messages=MESSAGES, sampling=pb.SamplingParams(**_GOOD)
            ).SerializeToString(),
            b"\x0a\x02\xff\xfe",
        ),
        "two million empty messages": Raw(_MANY_EMPTY, "invalid_value", "messages"),
        "two million empty tools": Raw(
            b"\x12\x06\x0a\x04user" + b"\x52\x00" * (2**21 - 16), "invalid_value", "tools"
        ),
    },
    "oip": {
        **_grpc(_infer([TEXT.encode()]), b"\x0a\x02\xff\xfe"),
        "a text that is not UTF-8": Raw(_infer([b"\xff\xfe"]), "invalid_value", "text_input"),
        "a shape beyond all bounds": Raw(
            _infer([b"a"], shape=[2**62] * 8), "invalid_value", "text_input"
        ),
        "a negative shape": Raw(_infer([b"a"], shape=[-1, -1]), "invalid_value", "text_input"),
        "65 texts": Raw(_infer([b"a"] * 65), "invalid_value", "text_input"),
        "a raw length beyond the end": Raw(
            _infer([b""], raw_input_contents=[struct.pack("<I", 2**32 - 1) + b"a"]),
            "invalid_value",
            "text_input",
        ),
    },
}
CASES = [
    (front, name)
    for front in RAW
    for name in (*VALUES, *RAW[front])
    if name in RAW[front] or not VALUES[name].on or front in VALUES[name].on
]


@dataclass
class Front:
    """One way in. `said` makes a request of fields; `send` has bytes answered."""

    name: str
    said: Callable[[Mapping[str, Any]], bytes]
    send: Callable[[bytes], Reply]

    def ask(self, **fields: Any) -> Reply:
        return self.send(self.said({**_GOOD, **fields}))


@dataclass
class Fronts:
    """All front ends of one server. A context manager."""

    base_url: str
    grpc_target: str
    by_name: dict[str, Front] = field(default_factory=dict)

    def __enter__(self) -> Fronts:
        self._http = httpx.Client(base_url=self.base_url, timeout=TIMEOUT_S)
        # Of its own: a channel with these options is shared with no other.
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(self.grpc_target, options=options)
        of_penstock = f"/{inference.SERVICE}"
        fronts = [
            Front("http completions", _http_body, self._poster("/v1/completions")),
            Front("http chat", _http_chat_body, self._poster("/v1/chat/completions")),
            Front("grpc generate", _generate_message, self._streamer(f"{of_penstock}/Generate")),
            Front("grpc chat", _chat_message, self._streamer(f"{of_penstock}/Chat")),
            Front("oip", _infer_message, self._caller(f"/{open_inference.SERVICE}/ModelInfer")),
        ]
        self.by_name = {front.name: front for front in fronts}
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._channel.close()

    def _poster(self, path: str) -> Callable[[bytes], Reply]:
        def send(body: bytes) -> Reply:
            json_type = {"content-type": "application/json"}
            answer = self._http.post(path, content=body, headers=json_type)
            if answer.status_code == 200:
                (choice,) = answer.json()["choices"]
                return Reply(200, answer=choice.get("text") or choice["message"]["content"])
            error = answer.json()["error"]
            return Reply(answer.status_code, error["code"], error["param"], error["message"])

        return send

    def _streamer(self, method: str) -> Callable[[bytes], Reply]:
        kind = pb.GenerateResponse if method.endswith("Generate") else pb.ChatResponse
        call = self._channel.unary_stream(method, None, kind.FromString)
        return _reply_of(
            lambda body: "".join(piece.text for piece in call(body, timeout=TIMEOUT_S))
        )

    def _caller(self, method: str) -> Callable[[bytes], Reply]:
        call = self._channel.unary_unary(method, None, oip.ModelInferResponse.FromString)

        def text(body: bytes) -> str:
            outputs = {each.name: each.contents for each in call(body, timeout=TIMEOUT_S).outputs}
            return outputs["text_output"].bytes_contents[0].decode()

        return _reply_of(text)


def _reply_of(text: Callable[[bytes], str]) -> Callable[[bytes], Reply]:
    def send(body: bytes) -> Reply:
        try:
            return Reply("OK", answer=text(body))
        except grpc.RpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            code_and_param = trailing.get("error-code"), trailing.get("error-param")
            return Reply(error.code().name, *code_and_param, error.details() or "")

    return send


_SHAPES = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def _http_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {_SHAPES[name]: fields[name] for name in _SHAPES if name in fields}
    rest = {name: value for name, value in fields.items() if name not in _SHAPES}
    return {**rest, "structured_outputs": shapes} if shapes else rest


def _http_body(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"prompt": TEXT, **_http_fields(fields)}).encode()


def _http_chat_body(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"messages": MESSAGES, **_http_fields(fields)}).encode()


def _grpc_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(fields)
    beside = ("model", "n", "truncate_prompt_tokens")
    rest = {name: given.pop(name) for name in beside if name in given}
    if "choice" in given:
        given["choice"] = pb.Choices(values=given["choice"])
    return {"sampling": pb.SamplingParams(**given), **rest}


def _generate_message(fields: Mapping[str, Any]) -> bytes:
    given = dict(fields)
    prompt = given.pop("prompt", TEXT)
    if isinstance(prompt, str):
        request = pb.GenerateRequest(text=prompt, **_grpc_fields(given))
    else:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **_grpc_fields(given))
    return request.SerializeToString()


def _chat_message(fields: Mapping[str, Any]) -> bytes:
    return pb.ChatRequest(messages=MESSAGES, **_grpc_fields(fields)).SerializeToString()


def _infer_message(fields: Mapping[str, Any]) -> bytes:
    given = dict(fields)
    request = oip.ModelInferRequest.FromString(_infer([given.pop("prompt", TEXT).encode()]))
    request.model_name = given.pop("model", "builtin")
    if "stop" in given:
        (given["stop"],) = given["stop"]
    for name, value in given.items():
        request.parameters[name].CopyFrom(_parameter(value))
    return request.SerializeToString()


_OIP_KNOWS = (
    *("temperature", "top_p", "min_p", "top_k", "max_tokens", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "model", "prompt"),
)


def check(front: Front, name: str, served: Any) -> None:
    """Have `front` answer a case of the corpus. `served`: its answer to the good request."""
    if name in RAW[front.name]:
        raw = RAW[front.name][name]
        reply = front.send(raw.body)
        if raw.code is None and raw.status is None:
            assert reply == Reply("OK", answer=served)
            return
        expected: tuple[str | None, str | None] = (raw.code, raw.param)
        status = raw.status or _status(front, raw.code)
    else:
        value = VALUES[name]
        reply = front.ask(**value.fields)
        expected = (value.code, value.param)
        if front.name in HTTP:
            shape = _SHAPES.get(value.param)
            param = f"structured_outputs.{shape}" if shape else value.param
            expected = (value.http, None) if value.http else (value.code, param)
        elif front.name == "oip" and not set(value.fields) <= set(_OIP_KNOWS):
            expected = ("unknown_parameter", value.param)
        if expected[0] is None:
            assert reply.answer
            return
        status = _status(front, expected[0])
    assert ((reply.code, reply.param), reply.status) == (expected, status), reply
    assert reply.words and len(reply.words) < 1000
    assert not any(word in reply.words for word in ("Traceback", "File ", ".py", "Error("))


def _status(front: Front, code: str | None) -> str | int:
    assert code is not None
    entry = CATALOGUE[code]
    return entry.http_status if front.name in HTTP else entry.grpc_status


class GoodTraffic:
    """Good requests in parallel, whose answers must not change. A context manager."""

    def __init__(self, base_url: str, grpc_target: str):
        self._addresses = (base_url, grpc_target)
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_answers = 0
        self.wrong: list[str] = []

    def __enter__(self) -> GoodTraffic:
        with Fronts(*self._addresses) as fronts:
            self.alone = {
                (front.name, i): front.ask(**self._good(i)).answer
                for front in fronts.by_name.values()
                for i in range(2)
            }
        assert all(self.alone.values()), self.alone
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        assert not self.wrong, self.wrong[:3]
        assert self.num_answers > 10

    @staticmethod
    def _good(number: int) -> dict[str, Any]:
        """What every front end can say; drawn by seed, and long enough to be in the way."""
        return {"temperature": number * 0.4, "seed": number, "max_tokens": 12 + 12 * number}

    def _run(self) -> None:
        chance = random.Random(0)
        with Fronts(*self._addresses) as fronts:
            while not self._leave.is_set():
                front, i = chance.choice(list(fronts.by_name.values())), chance.randrange(2)
                reply = front.ask(**self._good(i))
                if reply.answer != self.alone[front.name, i]:
                    self.wrong.append(f"{front.name}: {reply}, alone {self.alone[front.name, i]!r}")
                self.num_answers += 1


def run_all(fronts: Fronts) -> Iterator[str]:
    """The whole corpus, in an order that mixes the front ends; the cases, as they pass."""
    served = {name: front.ask().answer for name, front in fronts.by_name.items()}
    cases = list(CASES)
    random.Random(1).shuffle(cases)
    for front, name in cases:
        check(fronts.by_name[front], name, served[front])
        yield f"{front}: {name}"
