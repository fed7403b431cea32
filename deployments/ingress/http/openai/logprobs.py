"""OpenAI's shapes of logprobs: chat's, the older one of completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.deployments.ingress.core.logprobs import DecodedLogprob


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TopLogprob(_Part):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Part):
    """One entry for each token that is counted; characters may be spread over several tokens."""

    content: list[ContentLogprob]
    refusal: None


class CompletionLogprobs(_Part):
    """Four lists of one length. A token that is a part of a character reads `bytes:\\xe6\\xb0`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Part):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


def chat_logprobs(scores: Sequence[DecodedLogprob]) -> dict[str, Any]:
    content = [
        _named(score.token_bytes, score.logprob)
        | {"top_logprobs": [_named(each.token_bytes, each.logprob) for each in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[DecodedLogprob]) -> dict[str, Any]:
    return {
        "tokens": [_key(score.token_bytes) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [_by_key(score) for score in scores],
        "text_offset": [score.text_offset for score in scores],
    }


def prompt_logprobs(scores: Sequence[DecodedLogprob]) -> list[dict[str, Any] | None]:
    """By token id, the likeliest tokens and the one that is there; null for the first token."""
    bodies: list[dict[str, Any] | None] = []
    for score in scores:
        if score.logprob is None:
            bodies.append(None)
            continue
        body = {
            str(each.token_id): _ranked(each.token_bytes, each.logprob, rank)
            for rank, each in enumerate(score.top, 1)
        }
        own = _ranked(score.token_bytes, score.logprob, score.rank)
        bodies.append(body | {str(score.token_id): own})
    return bodies


def _named(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(token_bytes), "logprob": logprob, "bytes": list(token_bytes)}


def _ranked(token_bytes: bytes, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": _text(token_bytes)}


def _by_key(score: DecodedLogprob) -> dict[str, float] | None:
    """Of tokens that read alike the likelier one stays, but for the one that came."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for each in score.top:
        found.setdefault(_key(each.token_bytes), each.logprob)
    found[_key(score.token_bytes)] = score.logprob
    return found


def _text(token_bytes: bytes) -> str:
    return token_bytes.decode(errors="replace")


def _key(token_bytes: bytes) -> str:
    """The text of a token; of a part of a character its bytes, so that no two are alike."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
