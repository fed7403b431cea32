"""Texts to vectors over the request core: one request a text, which is admitted as any other.

The texts of one call share its bill, and not too many of them run at a time. The first that fails
ends the call, and the error says which it was.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, TokenUsage
from penstock.deployments.ingress.core.embeddings.vectors import Vectors, finished
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.text.pair_template import Pair

MAX_INPUTS = 2048  # of one call, as at OpenAI
MAX_RUNNING = 64  # of these, that wait at the gate or are computed at a time
# What the engine needs of sampling: the gate counts on one token, and every token is looked at.
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, context_policy="full")
# Of memory a number of a vector takes, as received and as written: fp32, base64 and JSON.
NUMBER_BYTES = 24
_PROMPT = re.compile(r"\bprompt\b")

Input = str | tuple[int, ...] | Pair


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """What a client asks for. `names`: of the inputs, for errors: one each."""

    inputs: tuple[Input, ...]
    names: tuple[str, ...]
    options: CallOptions
    context: CallContext
    dimensions: int | None = None  # the first of a vector; None: all
    normalize: bool = True  # each vector has length 1

    @property
    def field(self) -> str:
        """The field of the request that may have many inputs."""
        return _field_of(self.names[-1])


@dataclass(frozen=True, slots=True)
class Embeddings:
    """`vectors` [inputs, dimensions], in the order of the inputs."""

    vectors: Vectors
    usage: TokenUsage


def embedding_call(
    inputs: Sequence[Input],
    names: Iterable[str],
    options: CallOptions,
    context: CallContext,
    *,
    dimensions: int | None = None,
    normalize: bool = True,
) -> EmbeddingCall:
    """A call within its caps. Raises RequestError."""
    named = tuple(names)
    if len(inputs) > MAX_INPUTS:
        field = _field_of(named[-1])
        raise RequestError(f"{field} takes at most {MAX_INPUTS} texts in one call", param=field)
    if dimensions is not None and dimensions < 1:
        raise RequestError("dimensions must be at least 1", param="dimensions")
    options = replace(options, embeds=True)
    return EmbeddingCall(tuple(inputs), named, options, context, dimensions, normalize)


async def embed(
    core: RequestCore, call: EmbeddingCall, most_running: int = MAX_RUNNING
) -> Embeddings:
    """The vectors of all texts of `call`, or of a reranker the score of each pair, [pairs, 1];
    `most_running` of them run at a time. Cancelling this drops what has not ended. Raises
    RequestError or ServiceError."""
    _check_kind(core, call)
    generations = []
    for index in range(len(call.inputs)):
        if index:
            await core.turns.wait()  # a thousand texts at once would hold up all streams
        generations.append(await _prepared(core, call, index))
    raw: dict[int, bytes] = {}
    with core.open_calls.holding() as hold:
        async with _billed(core, call, generations, raw):
            left = iter(enumerate(generations))

            async def run_next() -> None:
                for index, generation in left:
                    await core.turns.wait()
                    with _named(call.names[index]):
                        raw[index] = await _vector(core, generation)
                    hold(NUMBER_BYTES * len(raw[index]) // 4)

            await _all([run_next() for _ in range(min(most_running, len(generations)))])
        usage = TokenUsage.total(each.usage for each in generations)
        if len({len(each) for each in raw.values()}) > 1:  # an update, while it ran
            raise ServiceError(
                "model_changed", "the model was changed while it embedded these texts"
            )
        size = sum(map(len, raw.values()))
        vectors = await run_off_loop_if_large(size, _finished, raw, call)
        return Embeddings(vectors, usage)


def _check_kind(core: RequestCore, call: EmbeddingCall) -> None:
    if core.model(call.options.model).scores_pairs and not isinstance(call.inputs[0], Pair):
        raise RequestError(
            "this model is a reranker, which embeds no texts: send pairs of texts to /v1/score or "
            "/v1/rerank, or start the server with --pooling last",
            param="model",
            code="unsupported_parameter",
        )


def _field_of(name: str) -> str:
    return name.partition("[")[0]


def _finished(raw: dict[int, bytes], call: EmbeddingCall) -> Vectors:
    joined = b"".join(raw[index] for index in range(len(raw)))
    numbers = np.frombuffer(joined, dtype="<f4").reshape(len(raw), -1)
    return finished(numbers, call.dimensions, normalize=call.normalize)


async def _prepared(core: RequestCore, call: EmbeddingCall, index: int) -> Generation:
    context = call.context.of_prompt(index, len(call.inputs))
    with _named(call.names[index]):
        return await core.prepare(Call(call.inputs[index], _PARAMS, call.options, context))


async def _vector(core: RequestCore, generation: Generation) -> bytes:
    """Run one request; its vector, as `Delta.embedding`."""
    admission = generation.admission
    if admission.longest_wait_s is not None:  # counted from now, not from when the call came
        until_s = time.monotonic() + admission.longest_wait_s
        request = replace(admission.request, wait_until_s=until_s)
        generation.admission = replace(admission, request=request)
    embedding = b""
    async with aclosing(core.run(generation)) as pieces:
        async for _, piece in pieces:
            embedding = piece.embedding or embedding
    if not embedding:
        raise ServiceError("cancelled")
    return embedding


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure ends them, and so does cancelling this."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _billed(
    core: RequestCore,
    call: EmbeddingCall,
    generations: Sequence[Generation],
    done: Collection[int],
) -> AsyncIterator[None]:
    """The call costs its tenant one request and the tokens of all texts, if any of them is `done`
    in the end."""
    num_tokens = sum(len(each.request.prompt_ids) for each in generations)
    billing = core.billing
    try:
        bill = None if billing is None else billing.bill(call.context.principal, num_tokens, 0, 1)
    except RequestError as refusal:
        raise RequestError(
            f"these texts have {num_tokens} tokens together, more than the whole quota of their "
            "tenant: send fewer in one call",
            param=call.field,
            code=refusal.code,
        ) from None
    if bill is None:
        yield
        return
    await bill.begin()
    try:
        yield
    finally:
        bill.ended(TokenUsage(num_tokens), is_computed=bool(done))


class _named:
    """A context manager: errors of one text say which it was."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, RequestError) and error.param in ("prompt", "input"):
            message = f"{self._name}: {_PROMPT.sub('text', error.message)}"
            raise RequestError(message, param=self._name, code=error.code) from None
