"""Results of `LLM`, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.deployments.ingress.core.call import TextDelta
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.logprobs import DecodedLogprob


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token. `rank` is 1 for the likeliest; None: unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = list[dict[int, Logprob]]  # of each token: itself first, and its alternatives


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of one prompt that was embedded. `prompt` None: it was given as token ids."""

    prompt: str | None
    outputs: EmbeddingOutput


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `finish_reason`: "stop", or "length" where max_tokens or the context ended it.

    `stop_reason` is the stop string or stop token that ended the answer, if one did. `token_ids`
    includes the end-of-sequence token, if that ended the answer.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # None: no logprobs were requested
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: TextDelta) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs:
            self.logprobs = (self.logprobs or []) + [_by_token(each) for each in piece.logprobs]
            total = sum(each.logprob or 0.0 for each in piece.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + total
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason.value
            self.stop_reason = piece.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt. `prompt`: its text, if it was given as text.

    `prompt_logprobs` has None for the first token, which follows nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finished: bool = True

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> RequestOutput:
        """For the answers to one prompt, without a token yet."""
        first = generations[0]
        return cls(
            first.call.context.request_id,
            first.call.prompt if isinstance(first.call.prompt, str) else None,
            list(first.request.prompt_ids),
            [CompletionOutput(index) for index in range(len(generations))],
        )

    def add(self, index: int, piece: TextDelta) -> None:
        """Add a piece of answer `index`."""
        self.outputs[index].add(piece)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if each.logprob is None else _by_token(each) for each in piece.prompt_logprobs
            ]
        if index == 0 and piece.usage is not None:
            self.num_cached_tokens = piece.usage.cached_tokens


def _by_token(token: DecodedLogprob) -> dict[int, Logprob]:
    text = token.token_bytes.decode(errors="replace")
    found = {token.token_id: Logprob(token.logprob or 0.0, token.rank or None, text)}
    for rank, each in enumerate(token.top, start=1):
        text = each.token_bytes.decode(errors="replace")
        found.setdefault(each.token_id, Logprob(each.logprob, rank, text))
    return found
