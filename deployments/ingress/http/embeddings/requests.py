"""Bodies of requests for embeddings, scores and ranks, as calls of the request core.

The fields of vLLM's and Jina's APIs that are not here are in tables: ignored, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from penstock.deployments.ingress.core.call import MAX_PRIORITY, CallContext, CallOptions
from penstock.deployments.ingress.core.embeddings.embed import (
    EmbeddingCall,
    Input,
    embedding_call,
)
from penstock.deployments.ingress.http.body import (
    Strict,
    body_values,
    json_object,
    strings,
    validated,
)
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import RequestError
from penstock.workers.text.pair_template import Pair

Encoding = Literal["float", "base64"]
Neutral = Mapping[str, tuple[Any, ...]]

# Harmless to ignore: names, and what other servers do with scores that have no bounds.
IGNORED = frozenset(("request_id", "activation", "softmax", "use_activation", "use_softmax"))
# At these values they change nothing.
UNSUPPORTED: Neutral = {
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "embedding_type": (None, "float"),
    "mm_processor_kwargs": (None, {}),
    "messages": (None, []),
    "late_chunking": (None, False),
}
# For models that take the purpose of a text: the setting unknown_fields decides on them.
HINTS: Neutral = dict.fromkeys(("input_type", "task", "prompt_name", "instruction"), (None, ""))


class TextsRequest(Strict):
    """What the requests have in common."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}  # of fields, on other servers

    model: str | None = Field(None, description="as /v1/models names it; default: the first one")
    user: str | None = Field(
        None, description="whom it is for: without API keys, those that wait share by it"
    )
    priority: int | None = Field(
        None, ge=0, le=MAX_PRIORITY, description="of those that wait, lower goes first; default 0"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        description="share computed prompts only with requests that have the same salt",
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="keep only this many tokens of each text, the last ones; -1: as many as fit",
    )
    add_special_tokens: bool | None = Field(
        None, description="the tokens that the tokenizer puts around a text; default true"
    )

    def options(self) -> CallOptions:
        return CallOptions(
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            tenant=self.user or "",
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens is not False,
        )


class EmbeddingRequest(TextsRequest):
    """Texts or token ids to embed."""

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Encoding | None = Field(
        None, description="of each embedding; base64: of its numbers as little-endian fp32"
    )
    dimensions: int | None = Field(
        None, ge=1, description="keep only this many numbers, the first ones; default: all"
    )
    normalize: bool | None = Field(
        None, description="give each embedding the length 1; default true"
    )

    def call(self, context: CallContext) -> EmbeddingCall:
        """Raises RequestError."""
        inputs, names = _named("input", self.input)
        return embedding_call(
            inputs,
            names,
            self.options(),
            context,
            dimensions=self.dimensions,
            normalize=self.normalize is not False,
        )


class PairsRequest(TextsRequest):
    """What requests for scores have in common."""

    instruction: str | None = Field(
        None,
        description="of rerankers: what a document should do for the query, instead of the "
        "model's own words",
    )
    use_activation: bool | None = Field(
        None,
        description="of rerankers: scores from 0 to 1; default true; false: the logits",
    )

    def pairs(self, ones: Sequence[str], others: Sequence[str]) -> list[Input]:
        """One of `ones`, or the only one, with each of `others`."""
        instruction = self.instruction or ""
        ones = list(ones) * (len(others) if len(ones) == 1 else 1)
        return [Pair(one, other, instruction) for one, other in zip(ones, others, strict=True)]


class ScoreRequest(PairsRequest):
    """Pairs of texts: one with each of several, or as many with as many."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "activation": "use_activation",
        **{"queries": "text_1", "data_1": "text_1"},
        **{"documents": "text_2", "items": "text_2", "data_2": "text_2"},
    }

    text_1: str | list[str] = Field(description="one text, or as many as text_2 has")
    text_2: str | list[str] = Field(description="the texts that those of text_1 are compared with")

    def call(self, context: CallContext, *, as_pairs: bool) -> EmbeddingCall:
        """With `as_pairs` an input for each pair; else the texts of text_1, and then those of
        text_2. Raises RequestError."""
        ones, names = _named("text_1", self.text_1)
        others, other_names = _named("text_2", self.text_2)
        if len(ones) not in (1, len(others)):
            raise RequestError(
                f"text_1 has {len(ones)} texts and text_2 {len(others)}: send one text_1, or as "
                "many as text_2 has",
                param="text_1",
            )
        if as_pairs:
            pairs = self.pairs(strings(self.text_1), strings(self.text_2))
            return embedding_call(pairs, other_names, self.options(), context, normalize=False)
        return embedding_call(ones + others, names + other_names, self.options(), context)

    @property
    def num_ones(self) -> int:
        """Texts of text_1."""
        return len(strings(self.text_1))


class RerankRequest(PairsRequest):
    """Documents to rank by how well they fit a query."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"activation": "use_activation"}

    query: str
    documents: list[str]
    top_n: int | None = Field(
        None, ge=0, description="number of documents to return, best first; default and 0: all"
    )
    return_documents: bool | None = Field(None, description="send their texts; default true")

    def call(self, context: CallContext, *, as_pairs: bool) -> EmbeddingCall:
        """With `as_pairs` an input for each document; else the query first. Raises RequestError."""
        documents, names = _named("documents", self.documents)
        if as_pairs:
            pairs = self.pairs([self.query], self.documents)
            return embedding_call(pairs, names, self.options(), context, normalize=False)
        return embedding_call([self.query, *documents], ["query", *names], self.options(), context)


EMBEDDINGS_PATH, SCORE_PATH, RERANK_PATH = "/v1/embeddings", "/v1/score", "/v1/rerank"
BODIES: dict[str, type[TextsRequest]] = {
    EMBEDDINGS_PATH: EmbeddingRequest,
    SCORE_PATH: ScoreRequest,
    RERANK_PATH: RerankRequest,
}
RequestT = TypeVar("RequestT", bound=TextsRequest)


def parse(kind: type[RequestT], body: bytes, left_out: IgnoredFields) -> RequestT:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong."""
    values = json_object(body)
    for theirs, ours in kind.OTHER_NAMES.items():
        if (value := values.pop(theirs, None)) is None:
            continue
        if values.get(ours) is not None:
            raise RequestError(f"{theirs} is another name of {ours}: send one", param=theirs)
        values[ours] = value
    kept = body_values(
        values, kind.model_fields, UNSUPPORTED, IGNORED, left_out, hints=HINTS, limits={}
    )
    return validated(kind, kept, left_out)


def _named(
    field: str, value: str | list[str] | list[int] | list[list[int]]
) -> tuple[list[Input], list[str]]:
    """The texts of a field, and what errors call them. Raises RequestError if there are none."""
    if isinstance(value, str):
        return [value], [field]
    if not value:
        raise RequestError(f"{field} is empty", param=field)
    if isinstance(value[0], int):
        return [tuple(each for each in value if isinstance(each, int))], [field]
    inputs: list[Input] = []
    for each in value:
        inputs.append(each if isinstance(each, str) else tuple(each))
    return inputs, [f"{field}[{index}]" for index in range(len(inputs))]
