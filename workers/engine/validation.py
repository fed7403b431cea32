"""Whether an engine can serve a request at all: validated before it is queued.

The ingress makes the same checks first; these also guard an engine that is used by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from penstock.workers.context_policy import Context, ContextSettings
from penstock.workers.experts.modes import mode_for
from penstock.workers.request import (
    Request,
    RequestError,
    check_input_length,
    check_prompt_scores,
)
from penstock.workers.structured.grammar import GrammarMatcher

LATE = "the deadline of this request has passed, or it has waited too long for a worker"


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """What the engine needs to know of a valid request."""

    max_total_tokens: int  # of prompt and answer together
    context: Context  # which earlier tokens each of its tokens sees
    moe_mode: str


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """The limits of one engine."""

    vocab_size: int
    contexts: ContextSettings
    num_blocks: int  # of the pool
    moe_mode: str = "exact"  # of requests that do not set it
    generates: bool = True  # its checkpoint has an LM head
    no_embedding: str = ""  # why it embeds no prompt; empty: it does

    def check(self, request: Request, matcher: GrammarMatcher | None) -> CheckedRequest:
        """Raises RequestError naming the field at fault. `matcher`: as for Engine.add."""
        vocab = self.vocab_size
        self._check_kind(request)
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            raise RequestError(f"prompt token ids must lie in [0, {vocab})", param="prompt")
        if any(not 0 <= token_id < vocab for token_id in request.emitted_ids):
            raise RequestError(f"emitted token ids must lie in [0, {vocab})", param="emitted_ids")
        request.params.check(vocab)
        if request.params.prompt_logprobs is not None:
            check_prompt_scores(len(request.prompt_ids) * (1 + request.params.prompt_logprobs))
        moe_mode = mode_for(request.params.moe_mode, self.moe_mode)
        max_total = self._max_total(request)
        num_known = len(request.prompt_ids) + len(request.emitted_ids)
        if num_known >= max_total and not request.embeds:
            raise RequestError("nothing is left to generate", param="emitted_ids")
        ends_s = (request.deadline_s, request.wait_until_s)
        if any(end_s is not None and end_s <= time.monotonic() for end_s in ends_s):
            raise RequestError(LATE, code="deadline_exceeded")
        _check_matcher(request, matcher)
        return CheckedRequest(max_total, self._context(request), moe_mode)

    def _check_kind(self, request: Request) -> None:
        """Whether this model does what is asked for at all: generate, or embed."""
        if request.embeds and self.no_embedding:
            raise RequestError(self.no_embedding, param="model", code="unsupported_parameter")
        if not request.embeds and not self.generates:
            raise RequestError(
                "this checkpoint has no LM head (lm_head, or tie_word_embeddings in config.json), "
                "so it generates no text: ask it for embeddings",
                param="model",
                code="unsupported_parameter",
            )

    def _context(self, request: Request) -> Context:
        context, size = self.contexts.context(request.params), self.contexts.block_size
        if context.full_tokens is not None:
            num_blocks = -(-(context.full_tokens + 1) // size) + 1
            if num_blocks > self.num_blocks:
                raise RequestError(
                    f"sinks and window take {num_blocks} KV blocks of {size} tokens; this worker "
                    f"has {self.num_blocks}",
                    param="window",
                )
        return context

    def _max_total(self, request: Request) -> int:
        params, num_prompt = request.params, len(request.prompt_ids)
        limit = self.contexts.max_total_tokens(params)
        if request.embeds:
            check_input_length(num_prompt, limit)
            return num_prompt
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; this model takes at most "
                f"{limit} tokens of prompt and answer together",
                param="prompt",
                code="context_length_exceeded",
            )
        max_total = limit if params.max_tokens is None else num_prompt + params.max_tokens
        if max_total > limit:
            raise RequestError(
                f"prompt ({num_prompt} tokens) + max_tokens ({params.max_tokens}) exceed the "
                f"{limit} tokens that this model takes; ask for at most {limit - num_prompt}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_total


def _check_matcher(request: Request, matcher: GrammarMatcher | None) -> None:
    spec = request.params.structured
    if spec is not None and matcher is None:
        raise RequestError(
            f"{spec.param}: this engine compiles no grammars",
            param=spec.param,
            code="unsupported_parameter",
        )
    if matcher is not None and matcher.is_complete:
        raise RequestError("nothing is left to generate", param="emitted_ids")
