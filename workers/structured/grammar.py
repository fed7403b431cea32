"""Structured output: compiles grammars and computes the tokens that may come next in an answer.

The library is llguidance (MIT, one wheel of 3 MB without dependencies). The alternative was
xgrammar: its wheel pulls in torch's and tvm's bindings, it compiles masks ahead of time for the
whole vocabulary without a bound, and its own advisories name recursion. llguidance computes each
mask on demand, in microseconds, and counts fuel while it compiles and at each step, so both end;
its regexes are derivatives, without backtracking.

Hostile grammars are bounded three times: structured_spec.py refuses by size and depth; a helper
process (trial.py) compiles each new grammar first and is killed after a second; then the same code
compiles here, which the trial has shown to end. Each sequence has a matcher with its own lexer:
copies would share one lexer and its cap on states, so one client's answers could exhaust another's.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from penstock.workers.request import RequestError
from penstock.workers.structured import trial
from penstock.workers.structured.sandbox import Helper, HelperFailed
from penstock.workers.structured_spec import StructuredSpec

NUM_HELPERS = 2
MAX_CACHED = 256  # verdicts, good or bad
MAX_CACHED_BYTES = 8 << 20


class GrammarMatcher:
    """The state of one answer in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Iterable[int], param: str):
        self.param = param
        self._matcher = matcher
        self.eos_token_ids = tuple(eos_token_ids)
        self._is_ended = False
        self._drafts: list[int] = []  # consumed for the last row that was constrained

    def advance(self, token_id: int) -> None:
        """`token_id` is now part of the answer."""
        self._consume_drafts(())
        if token_id in self.eos_token_ids:
            self._is_ended = True
        else:
            self._matcher.consume_token(token_id)

    def leading(self, drafts: tuple[int, ...]) -> int:
        """How many of `drafts` the grammar allows one after the other, without an end."""
        self._consume_drafts(())
        end = next((i for i, each in enumerate(drafts) if each in self.eos_token_ids), len(drafts))
        num: int = self._matcher.validate_tokens(list(drafts[:end]))
        self._consume_drafts(drafts[:num])
        while self._drafts and self._matcher.is_stopped():  # nothing can follow: the answer's end
            self._consume_drafts(drafts[: len(self._drafts) - 1])
        return len(self._drafts)

    def forced(self) -> tuple[int, ...]:
        """The tokens of the text that must come next, if the grammar leaves no choice."""
        self._consume_drafts(())
        return tuple(self._matcher.compute_ff_tokens())

    def _consume_drafts(self, drafts: tuple[int, ...]) -> None:
        """Be in the state after `drafts`, which the grammar allows after the answer so far."""
        known = 0
        while known < min(len(drafts), len(self._drafts)) and self._drafts[known] == drafts[known]:
            known += 1
        if known < len(self._drafts):
            self._matcher.rollback(len(self._drafts) - known)
            del self._drafts[known:]
        for token_id in drafts[known:]:
            self._matcher.consume_token(token_id)
            self._drafts.append(token_id)

    @property
    def is_complete(self) -> bool:
        """The answer fits the grammar, and nothing can follow in it."""
        return self._is_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def is_accepting(self) -> bool:
        """The answer fits the grammar as it is; more may follow."""
        return self._is_ended or self._matcher.is_accepting()

    @property
    def has_failed(self) -> bool:
        """The library reached one of its limits, or a token did not fit the grammar."""
        return self._matcher.is_error()

    def constrain(
        self,
        row: Tensor,
        edit: Callable[[Tensor], None] | None,
        forbidden: Sequence[int],
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Mask `row`, fp32 [vocab], by the grammar, and apply `edit` and `forbidden`. The row comes
        after `drafts`, which `leading` has allowed.

        The grammar takes precedence: if `edit` (bias, penalties, bad words) and `forbidden` (tokens
        that min_tokens or ignore_eos rule out) leave no token that it allows, they are ignored. NaN
        and +inf are kept, so that they are detected; a failed grammar gives all NaN.
        """
        self._consume_drafts(drafts)
        mask = self._mask(row)
        if mask is None:
            row.fill_(torch.nan)
            return
        if edit is None and not forbidden:
            row += mask
            return
        kept = row + mask
        if edit is not None:
            edit(row)
        if forbidden:
            row[list(forbidden)] = -torch.inf
        row += mask
        if not bool((row > -torch.inf).any()):
            row.copy_(kept)

    def _mask(self, row: Tensor) -> Tensor | None:
        """0 for tokens that the grammar allows, else -inf; None if the grammar failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return None
        allowed = np.unpackbits(bits, bitorder="little", count=row.shape[0]).view(bool)
        mask = np.where(allowed, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(mask).to(row.device)


class GrammarCompiler:
    """Makes matchers for one model's vocabulary. It may block: not for the engine's thread."""

    def __init__(
        self, load_tokenizer: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]
    ):
        """`load_tokenizer` returns the text of a tokenizer.json; it is called on first use."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._lock = threading.Lock()  # of what follows
        self._tokenizer: LLTokenizer | None = None
        self._verdicts: OrderedDict[StructuredSpec, dict[str, str]] = OrderedDict()
        self._num_bytes = 0
        self._idle: queue.SimpleQueue[Helper] = queue.SimpleQueue()
        for _ in range(NUM_HELPERS):
            self._idle.put(Helper())

    def matcher(self, spec: StructuredSpec, emitted_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher in the state after `emitted_ids`. Raises RequestError naming `spec.param`."""
        problem = spec.problem()
        if problem is not None:
            raise RequestError(f"{spec.param} {problem}", param=spec.param)
        tokenizer = self._tokenizer_once(spec)
        verdict = self._known(spec) or self._tried(spec)
        if "error" in verdict:
            raise RequestError(f"{spec.param}: {verdict['error']}", param=spec.param)
        matcher = LLMatcher(tokenizer, verdict["grammar"], log_level=0, limits=trial.limits())
        # The first mask, the most expensive one, is also computed here, not on the engine's thread.
        found = trial.problem(matcher)
        if found is not None:
            raise RequestError(f"{spec.param}: {found}", param=spec.param)
        made = GrammarMatcher(matcher, self._eos, spec.param)
        for token_id in emitted_ids:
            made.advance(token_id)
        if made.has_failed:
            raise RequestError("these tokens do not fit the grammar", param="emitted_ids")
        return made

    def close(self) -> None:
        """Stop the helper processes. Call when no compilation is running."""
        for _ in range(NUM_HELPERS):
            self._idle.get().close()

    def _tokenizer_once(self, spec: StructuredSpec) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                eos = list(self._eos) or None
                try:
                    self._tokenizer = LLTokenizer(
                        self._load_tokenizer(), n_vocab=self._vocab_size, eos_token=eos
                    )
                except Exception as error:  # the library raises what it likes
                    raise RequestError(
                        "the tokenizer of this model cannot be combined with a grammar",
                        param=spec.param,
                        code="unsupported_parameter",
                    ) from error
            return self._tokenizer

    def _known(self, spec: StructuredSpec) -> dict[str, str] | None:
        with self._lock:
            verdict = self._verdicts.get(spec)
            if verdict is not None:
                self._verdicts.move_to_end(spec)
            return verdict

    def _tried(self, spec: StructuredSpec) -> dict[str, str]:
        """The helper's verdict on `spec`, cached so that each grammar is tried once.

        Raises RequestError overloaded, and remembers nothing, if the helper had no chance.
        """
        question = {"kind": spec.kind.value, "text": spec.text, "lenient": spec.lenient}
        helper = self._idle.get()
        try:
            verdict = _asked(helper, question, spec.param)
        finally:
            self._idle.put(helper)
        with self._lock:
            if spec not in self._verdicts:
                self._verdicts[spec] = verdict
                self._num_bytes += _size(spec, verdict)
            while len(self._verdicts) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                self._num_bytes -= _size(*self._verdicts.popitem(last=False))
        return verdict


def _asked(helper: Helper, question: dict[str, Any], param: str) -> dict[str, str]:
    """The answer of a helper, which may end once without the question being to blame."""
    for attempt in range(2):
        try:
            verdict: dict[str, str] = helper.ask(question)
            return verdict
        except HelperFailed as failure:
            if failure.is_verdict or (failure.has_ended and attempt):
                break
            if not failure.has_ended:
                raise RequestError(
                    "this server has no time to compile a grammar now; try again shortly",
                    param=param,
                    code="overloaded",
                ) from failure
    return {"error": "this takes too much time or memory to compile"}


def _size(spec: StructuredSpec, verdict: dict[str, str]) -> int:
    """Bytes of the texts, at most: a character takes up to four."""
    return 4 * (len(spec.text) + sum(map(len, verdict.values())))
