"""One running answer: token deltas in, pieces of text out, until a finish reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.answers.reasoning import ReasoningSplit
from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport
from penstock.deployments.ingress.core.answers.tool_parser import ToolCallReader
from penstock.deployments.ingress.core.billing import Bill
from penstock.deployments.ingress.core.bounds.deadline import Deadline
from penstock.deployments.ingress.core.call import Call, ChatPrompt, TextDelta, TokenUsage
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.logprobs import (
    DecodedLogprob,
    LogprobQueue,
    decode_logprob,
    decode_prompt_logprobs,
)
from penstock.deployments.ingress.core.request_metrics import RequestTimes
from penstock.deployments.ingress.core.validation import is_scoring_only, num_prompt_scores
from penstock.workers.request import Delta, FinishReason, RequestError, TokenLogprob
from penstock.workers.text.detokenizer import StopChecker
from penstock.workers.text.tokenizer import Tokenizer

# Of memory, for each token named in the scores of a prompt: as received, decoded, and written.
# With MAX_OPEN_BYTES, less of them are on the way to an ingress than MAX_PENDING_BYTES of
# channel/peer.py: they are not what ends its connection.
SCORE_BYTES = 700


class Generation:
    """A checked request and the state of its answer."""

    def __init__(
        self,
        admission: AdmissionRequest,
        call: Call,
        tokenizer: Tokenizer,
        start_s: float,
        *,
        split: ReasoningSplit | None = None,
        support: ToolSupport | None = None,
        first: Generation | None = None,
        bill: Bill | None = None,
    ):
        """`start_s`: when the call came. `split`: of reasoning from the answer, where it is marked.
        `support`: how calls of tools are read; None: they are text.

        `first`: the first answer to the same prompt, if this is another one. `bill`: of all
        answers to the prompt; None: its tenant has no quotas.
        """
        self.admission = admission
        self.request = request = admission.request
        self.call = call
        self.first, self.bill = first, bill
        self.times = RequestTimes(start_s)
        self.usage = TokenUsage(
            prompt_tokens=len(request.prompt_ids), shares_prompt=first is not None
        )
        self.deadline = Deadline(call.context.deadline_s)
        self.is_cancelled = False
        self._end_code: str | None = None  # of the error with which it is cancelled
        self.has_begun = asyncio.Event()  # its prompt is computed, or never will be
        self.prompt_logprobs: list[TokenLogprob] = []
        self._token_bytes = tokenizer.token_bytes
        prompt = call.prompt
        tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
        shown: frozenset[str] = frozenset() if split is None else split.shown
        self._tool_calls = None
        if tools is not None and support is not None:
            shown |= support.marks(tools)
            parser = support.parser(tools, request.request_id)
            self._tool_calls = ToolCallReader(
                parser, request.request_id, is_parallel=tools.is_parallel
            )
        # What continues its prompt, a completion or a part of an answer, may begin with a space.
        is_new = isinstance(prompt, ChatPrompt) and not prompt.continues_last
        continues = not (call.options.echo or is_new)
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=call.options.skip_special_tokens,
            after=request.prompt_ids if continues else (),
            shown=shown,
        )
        self._reasoning = None if split is None else split.reader()
        self._thoughts: list[str] = []  # of the piece that is being made
        self._stops = StopChecker(request.params.stop)
        self._logprobs = None if call.params.logprobs is None else LogprobQueue()
        # What its tokens spell is the answer, with nothing to look for in it or to tell of it.
        self._is_plain = not request.params.stop and split is None and self._logprobs is None
        self._num_sent = 0  # characters
        self._is_first_delta = True

    @property
    def num_prompt_scores(self) -> int:
        """Tokens that it names in the scores of its prompt."""
        return num_prompt_scores(self.call, len(self.request.prompt_ids))

    @property
    def num_held_bytes(self) -> int:
        """Of memory that they take while it runs, beside the body of its call."""
        return SCORE_BYTES * self.num_prompt_scores

    async def wait_for_prompt(self) -> None:
        """Until the first answer to the same prompt has left it in the prefix cache.

        Raises ServiceError if the deadline passes before.
        """
        if self.first is None:
            return
        try:
            await self.deadline.wait(self.first.has_begun.wait())
        except TimeoutError:
            if not self.is_cancelled:
                raise ServiceError("deadline_exceeded") from None

    async def next(self, deltas: AsyncIterator[Delta]) -> Delta:
        """The next of `deltas`; ABORT once it is cancelled.

        Raises ServiceError if the deadline passes before, or if they end without a finish reason.
        """
        try:
            if not self.is_cancelled:
                return await self.deadline.wait(anext(deltas))
        except TimeoutError:
            if not self.is_cancelled:
                raise ServiceError("deadline_exceeded") from None
        except StopAsyncIteration:
            raise ServiceError("worker_lost") from None
        if self._end_code is not None:
            raise ServiceError(self._end_code)
        return Delta(self.request.request_id, [], FinishReason.ABORT)

    def read_tool_calls(self, piece: TextDelta) -> TextDelta:
        """`piece` with the calls in its text taken out, where the call has tools."""
        return piece if self._tool_calls is None else self._tool_calls.read(piece)

    def cancel(self, code: str | None = None) -> None:
        """End the answer, with an error where a code is given: the task that waits wakes."""
        self.is_cancelled, self._end_code = True, code
        self.deadline.expire()

    def work_in(self, delta: Delta) -> int:
        """How much `take` has to spell out of `delta`, in tokens."""
        num_prompt = len(delta.prompt_logprobs)
        if self._is_first_delta and self.call.options.echo:
            num_prompt = len(self.request.prompt_ids)
        return len(delta.token_ids) + num_prompt * (1 + (self.request.params.prompt_logprobs or 0))

    def take(self, delta: Delta) -> TextDelta:
        """The text that `delta` adds. Raises ServiceError if it says that the request failed.

        Tokens after a complete stop string are neither rendered nor counted, so the answer does
        not depend on how many tokens came in one delta.
        """
        if delta.finish_reason is FinishReason.ERROR:
            if delta.error_message:
                raise RequestError(
                    delta.error_message,
                    param=delta.error_param,
                    code=delta.error or "internal_error",
                )
            raise ServiceError(delta.error or "internal_error")
        self._take_counts(delta)
        if delta.finish_reason is not None:
            self._take_moe(delta)
        if not self._is_first_delta:
            return self._answer(delta, "")
        self._is_first_delta = False
        self.prompt_logprobs = (self.first or self).prompt_logprobs or delta.prompt_logprobs
        echo = self._echo() if self.call.options.echo else ""
        if is_scoring_only(self.call) and delta.finish_reason is not FinishReason.ABORT:
            text = echo + self._detokenizer.finish()
            piece = self._last(text, [], FinishReason.LENGTH, None)
        else:
            piece = self._answer(delta, echo)
        piece.embedding = delta.embedding
        if self.call.params.prompt_logprobs is not None:
            piece.prompt_logprobs = self._decoded_prompt(self.call.params.prompt_logprobs)
        return piece

    def _take_counts(self, delta: Delta) -> None:
        """They only grow, and not every delta has them."""
        usage = self.usage
        usage.cached_tokens = max(usage.cached_tokens, delta.num_cached_tokens)
        usage.evicted_tokens = max(usage.evicted_tokens, delta.num_evicted_tokens)
        usage.draft_tokens = max(usage.draft_tokens, delta.num_draft_tokens)
        usage.accepted_draft_tokens = max(usage.accepted_draft_tokens, delta.num_accepted_tokens)

    def _take_moe(self, last: Delta) -> None:
        """How exact the experts were: said where they were not, or where it was asked for."""
        if last.moe_mode != "exact" or self.call.params.moe_mode is not None:
            self.usage.moe_mode = last.moe_mode
            self.usage.neurons = last.num_neurons
            self.usage.skipped_neurons = last.num_skipped_neurons

    def _answer(self, delta: Delta, echo: str) -> TextDelta:
        if self._is_plain and delta.finish_reason is None:
            self.usage.completion_tokens += len(delta.token_ids)
            return self._piece(echo + self._detokenizer.feed(delta.token_ids), delta.token_ids)
        texts = [echo]
        for i, token_id in enumerate(delta.token_ids):
            is_stop = delta.stop_token_id is not None and i + 1 == len(delta.token_ids)
            is_rendered = not is_stop or self.call.options.include_stop_str_in_output
            self.usage.completion_tokens += 1
            added = self._detokenizer.feed([token_id]) if is_rendered else ""
            if self._logprobs is not None:
                num_top = self.call.params.logprobs or 0
                self._logprobs.add(
                    decode_logprob(delta.logprobs[i], num_top, self._token_bytes), added
                )
            text, stop = self._check(self._without_reasoning(added))
            texts.append(text)
            if stop is not None:
                ids = delta.token_ids[: i + 1]
                return self._last("".join(texts), ids, FinishReason.STOP, stop)
        if delta.finish_reason is None:
            return self._piece("".join(texts), delta.token_ids)
        text, stop = self._check(self._without_reasoning(self._detokenizer.finish(), is_end=True))
        texts.append(text)
        if stop is not None:
            return self._last("".join(texts), delta.token_ids, FinishReason.STOP, stop)
        texts.append(self._stops.finish())
        is_asked_for = delta.stop_token_id in self.request.params.stop_token_ids
        stop_token_id = delta.stop_token_id if is_asked_for else None
        return self._last("".join(texts), delta.token_ids, delta.finish_reason, stop_token_id)

    def _echo(self) -> str:
        """The text of the prompt, before which no text was; an unfinished character waits."""
        texts = [self._detokenizer.feed([token_id]) for token_id in self.request.prompt_ids]
        if self._logprobs is not None:
            for score, text in zip(self._decoded_prompt(self.call.params.logprobs or 0), texts):
                self._logprobs.add(score, text)
        return "".join(texts)

    def _decoded_prompt(self, num_top: int) -> list[DecodedLogprob]:
        return decode_prompt_logprobs(
            self.request.prompt_ids, self.prompt_logprobs, num_top, self._token_bytes
        )

    def _without_reasoning(self, text: str, *, is_end: bool = False) -> str:
        """What of `text` is answer; the reasoning in it goes out with the next piece."""
        reader = self._reasoning
        if reader is None:
            return text
        was_inside = reader.is_inside
        thought, text = reader.feed(text)
        if was_inside or reader.is_inside:
            self.usage.reasoning_tokens = self.usage.completion_tokens
        if is_end:
            last_thought, last_text = reader.finish()
            thought, text = thought + last_thought, text + last_text
        self._thoughts.append(thought)
        return text

    def _check(self, text: str) -> tuple[str, str | None]:
        """Stop strings count only in text that came after the first min_tokens tokens."""
        if self.usage.completion_tokens <= self.request.params.min_tokens:
            return text, None
        text, stop = self._stops.feed(text)
        if stop is not None and self.call.options.include_stop_str_in_output:
            text += stop
        return text, stop

    def _piece(self, text: str, token_ids: list[int]) -> TextDelta:
        self._num_sent += len(text)
        num_out = self._num_sent
        if self._reasoning is not None:
            num_out += self._reasoning.num_taken
        logprobs = [] if self._logprobs is None else self._logprobs.release(num_out)
        thought = "".join(self._thoughts)
        self._thoughts.clear()
        return TextDelta(text, token_ids, logprobs=logprobs, reasoning=thought)

    def _last(
        self, text: str, token_ids: list[int], reason: FinishReason, stop: str | int | None
    ) -> TextDelta:
        piece = self._piece(text, token_ids)
        piece.finish_reason, piece.stop_reason, piece.usage = reason, stop, self.usage
        if self._logprobs is not None:
            piece.logprobs += self._logprobs.release_all(self._num_sent)
        return piece
