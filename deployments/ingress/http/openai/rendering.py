"""OpenAI's chat and completion answers, built of plain dictionaries: whole, and as events.

schemas.py has the models that describe them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.deployments.ingress.core.call import (
    RequestTimings,
    TextDelta,
    TokenUsage,
    ToolCallPiece,
)
from penstock.deployments.ingress.core.logprobs import DecodedLogprob, num_listed_tokens
from penstock.deployments.ingress.http.events import server_sent
from penstock.deployments.ingress.http.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from penstock.deployments.ingress.http.openai.schemas import TimingsBody


def usage_body(usages: Sequence[TokenUsage]) -> dict[str, Any]:
    """The sum over all prompts of a call."""
    total = TokenUsage.total(usages)
    body: dict[str, Any] = {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": total.reasoning_tokens},
    }
    if total.draft_tokens:
        body["completion_tokens_details"] |= {
            "accepted_prediction_tokens": total.accepted_draft_tokens,
            "rejected_prediction_tokens": total.draft_tokens - total.accepted_draft_tokens,
        }
    if total.evicted_tokens:
        body["evicted_tokens"] = total.evicted_tokens
    if total.moe_mode:
        body["moe_mode"] = total.moe_mode
    if total.neurons:
        body |= {"neurons": total.neurons, "skipped_neurons": total.skipped_neurons}
    if any(usage.timings is not None for usage in usages):
        body["timings"] = _timings_body([u.timings for u in usages if u.timings is not None])
    return body


def _timings_body(timings: Sequence[RequestTimings]) -> dict[str, float | None]:
    body: dict[str, float | None] = {}
    for name in TimingsBody.model_fields:
        known = [seconds for each in timings if (seconds := getattr(each, name)) is not None]
        body[name] = round(max(known), 6) if known else None
    return body


@dataclass(slots=True)
class CompletedChoice:
    """One choice, put together from its pieces."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[DecodedLogprob] = field(default_factory=list)
    prompt_logprobs: list[DecodedLogprob] | None = None
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    last: TextDelta | None = None

    def add(self, piece: TextDelta) -> None:
        for call in piece.tool_calls:
            if call.name is not None:
                self.tool_calls[call.index] = tool_call_body(call)
            else:
                self.tool_calls[call.index]["function"]["arguments"] += call.arguments
        self.texts.append(piece.text)
        self.thoughts.append(piece.reasoning)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.last = piece

    @property
    def size(self) -> int:
        """How much there is to write down, in tokens."""
        return num_listed_tokens(self.logprobs, self.prompt_logprobs)


class ChatRenderer:
    """Builds the bodies of one answer; `is_chat` tells chat from completions."""

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        is_chat: bool,
        shows_usage: bool,
        running: Sequence[TokenUsage] = (),
        hides_reasoning: bool = False,
        shows_logprobs: bool = False,
        prompts: Sequence[Sequence[int]] = (),
        created_s: int | None = None,
    ):
        """`shows_usage`: a stream ends with a chunk for usage, and has a null in the others.

        `running`: the usage of each choice as it grows, if every chunk is to show that of its
        choice. `hides_reasoning`: it is no part of the answer. `prompts`: the prompt of each
        choice, if token ids are to be shown. `created_s`: when the call came, in seconds since
        1970; None: now.
        """
        self.is_chat = is_chat
        self._running, self._hides_reasoning = running, hides_reasoning
        self._num_tokens = [0] * len(running)  # of each choice, in the pieces so far
        self.shows_usage = shows_usage
        self._shows_logprobs = shows_logprobs
        self._prompts = prompts
        self._begun: set[int] = set()
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}" if is_chat else f"cmpl-{request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()) if created_s is None else created_s,
            "model": model,
        }

    def whole(self, choices: Sequence[CompletedChoice]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        bodies, usages = [], []
        head = dict(self._head)
        for index, choice in enumerate(choices):
            assert choice.last is not None, "an answer has at least its last piece"
            assert choice.last.usage is not None
            usages.append(choice.last.usage)
            text = "".join(choice.texts)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if not self._hides_reasoning:
                message |= _reasoning_body("".join(choice.thoughts))
            if not text and (choice.tool_calls or "reasoning" in message):
                message["content"] = None
            if choice.tool_calls:
                message["tool_calls"] = list(choice.tool_calls.values())
            body = {
                "index": index,
                **({"message": message} if self.is_chat else {"text": text}),
                "logprobs": self._logprobs(choice.logprobs) if self._shows_logprobs else None,
                **_ending(choice.last),
                **({"token_ids": choice.token_ids} if self._prompts else {}),
            }
            # Of the prompt, chat tells in the answer as a whole, completions in each choice.
            (head if self.is_chat else body).update(
                self._about_prompt(index, choice.prompt_logprobs)
            )
            bodies.append(body)
        return {**head, "choices": bodies, "usage": usage_body(usages)}

    def events(self, index: int, piece: TextDelta, event_id: str | None = None) -> bytes:
        """The chunks of `piece` as server-sent events; as a single one, if that has an id.

        A client that has the event of an id has all of the piece.
        """
        chunks = self.chunks(index, piece)
        if event_id is None:
            return b"".join(map(server_sent, chunks))
        return server_sent(_as_one(chunks), event_id=event_id) if chunks else b""

    def count(self, index: int, piece: TextDelta) -> None:
        """Take the tokens of `piece` into the usage so far; call it before `events`."""
        if self._running:
            self._num_tokens[index] += len(piece.token_ids)

    def _usage_so_far(self, index: int) -> TokenUsage:
        """An answer may be ahead of the pieces of it that are told."""
        usage, num_tokens = self._running[index], self._num_tokens[index]
        num_thought = min(usage.reasoning_tokens, num_tokens)
        return replace(
            usage,
            completion_tokens=num_tokens,
            reasoning_tokens=num_thought,
            shares_prompt=False,
        )

    def skip(self, index: int) -> None:
        """The client has the first chunk of a choice already."""
        self._begun.add(index)

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that names the role, before the first text of a chat answer."""
        return self._chunk(
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        )

    def chunks(self, index: int, piece: TextDelta) -> list[dict[str, Any]]:
        """What a stream says of `piece`: text, then in chat's own chunk the end."""
        is_last = piece.finish_reason is not None
        thought = "" if self._hides_reasoning else piece.reasoning
        about_tokens = self._about_tokens(piece)
        about_prompt = self._about_prompt(index, piece.prompt_logprobs, once=True)
        says_something = bool(
            piece.text or thought or piece.logprobs or about_tokens or about_prompt
        )
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        if not self.is_chat:
            ending = _ending(piece) if is_last else {"finish_reason": None}
            choice = {"index": index, "text": piece.text, "logprobs": logprobs, **ending}
            choice |= {**about_tokens, **about_prompt}
            return [self._chunk(choice)] if says_something or is_last else []
        chunks: list[dict[str, Any]] = []
        if says_something:
            delta = _reasoning_body(thought)
            if piece.text or not delta:
                delta["content"] = piece.text
            choice = {"index": index, "delta": delta, "logprobs": logprobs}
            choice |= {"finish_reason": None, **about_tokens}
            chunks.append({**self._chunk(choice), **about_prompt})
        if piece.tool_calls:
            calls = _call_bodies(piece.tool_calls)
            choice = {"index": index, "delta": {"tool_calls": calls}, "logprobs": None}
            chunks.append(self._chunk({**choice, "finish_reason": None}))
        if is_last:
            choice = {"index": index, "delta": {}, "logprobs": None, **_ending(piece)}
            chunks.append(self._chunk(choice))
        return chunks

    def usage_chunk(self, usages: Sequence[TokenUsage]) -> dict[str, Any]:
        return {**self._chunk(None), "usage": usage_body(usages)}

    def _logprobs(self, scores: Sequence[DecodedLogprob]) -> dict[str, Any]:
        return chat_logprobs(scores) if self.is_chat else completion_logprobs(scores)

    def _about_tokens(self, piece: TextDelta) -> dict[str, Any]:
        return {"token_ids": piece.token_ids} if self._prompts and piece.token_ids else {}

    def _about_prompt(
        self, index: int, scores: Sequence[DecodedLogprob] | None, *, once: bool = False
    ) -> dict[str, Any]:
        """The fields about the prompt of a choice; with `once`, only in its first chunk."""
        if (once and index in self._begun) or (self.is_chat and index):
            return {}  # all choices of a chat share one prompt
        self._begun.add(index)
        fields: dict[str, Any] = {}
        if self._prompts:
            fields["prompt_token_ids"] = list(self._prompts[index])
        if scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(scores)
        return fields

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head, "choices": [] if choice is None else [choice]}
        if self.is_chat:
            chunk["object"] = "chat.completion.chunk"
        if self.shows_usage:
            chunk["usage"] = None
        if self._running and choice is not None:
            chunk["usage"] = usage_body([self._usage_so_far(choice["index"])])
        return chunk


def _as_one(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """One chunk with all that the chunks of a piece say."""
    first = chunks[0]
    choice = first["choices"][0]
    for chunk in chunks[1:]:
        (other,) = chunk["choices"]
        choice["delta"] |= other["delta"]
        choice |= {name: other[name] for name in ("finish_reason", "stop_reason") if name in other}
    return first


def _reasoning_body(text: str) -> dict[str, str]:
    """Under both names that servers give it; nothing, where there is none."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _ending(piece: TextDelta) -> dict[str, Any]:
    assert piece.finish_reason is not None
    reason = "tool_calls" if piece.ends_in_tool_calls else piece.finish_reason.value
    return {"finish_reason": reason, "stop_reason": piece.stop_reason}


def _call_bodies(pieces: Sequence[ToolCallPiece]) -> list[dict[str, Any]]:
    """One entry of a chunk for each call, however many pieces of it came at once: there are clients
    that read no second entry of a call."""
    bodies: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.index in bodies:
            bodies[piece.index]["function"]["arguments"] += piece.arguments
        else:
            bodies[piece.index] = {"index": piece.index, **tool_call_body(piece)}
    return list(bodies.values())


def tool_call_body(piece: ToolCallPiece) -> dict[str, Any]:
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.call_id, "type": "function", "function": function}
