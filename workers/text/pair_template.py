"""The prompt in which a reranker reads a query and a document.

Chat templates of rerankers know the roles query and document, and system for an instruction, as
sentence-transformers and vLLM send them. Qwen3-Reranker was published without one: its prompt is
that of its model card.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError
from penstock.workers.text.tokenizer import Tokenizer

QUERY_ROLE, DOCUMENT_ROLE = "query", "document"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_PROBE = ("penstock-query", "penstock-document")


@dataclass(frozen=True, slots=True)
class Pair:
    """What is scored. `instruction`: what the document should do for the query; empty: the
    default of the model."""

    query: str
    document: str
    instruction: str = ""


class PairTemplate:
    """Renders pairs for one model."""

    def __init__(self, tokenizer: Tokenizer, model_type: str):
        """`model_type`: as config.json names it. Raises ConfigError where neither the chat template
        nor the family says how a pair is written."""
        self._tokenizer = tokenizer
        self._has_roles = _knows_roles(tokenizer)
        if not self._has_roles and model_type != "qwen3":
            raise ConfigError(
                "this model scores pairs of texts, and its chat template does not write the roles "
                "query and document: name one that does with --chat-template, or serve the model "
                "for embeddings with --pooling last"
            )

    def ids(self, pair: Pair, max_tokens: int | None = None) -> list[int]:
        """The tokens of the prompt: at most `max_tokens`, for which the document loses its end.

        Raises RequestError where no document would be left, or the chat template refuses the pair.
        """
        ids = self._encode(pair)
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        document = self._tokenizer.encode(pair.document, add_special_tokens=False)
        num_kept = len(document)
        while len(ids) > max_tokens:
            num_kept -= len(ids) - max_tokens
            if num_kept < 1:
                raise RequestError(
                    f"truncate_prompt_tokens {max_tokens} leaves no room for the document, beside "
                    "the query and what the model is told",
                    param="truncate_prompt_tokens",
                )
            text = self._tokenizer.decode(document[:num_kept])
            ids = self._encode(Pair(pair.query, text, pair.instruction))
        return ids

    def _encode(self, pair: Pair) -> list[int]:
        return self._tokenizer.encode(self._render(pair), add_special_tokens=False)

    def _render(self, pair: Pair) -> str:
        if self._has_roles:
            return _by_roles(self._tokenizer, pair)
        return _QWEN3.format(
            instruction=pair.instruction or _QWEN3_INSTRUCTION,
            query=pair.query,
            document=pair.document,
        )


def _by_roles(tokenizer: Tokenizer, pair: Pair) -> str:
    messages = [
        {"role": QUERY_ROLE, "content": pair.query},
        {"role": DOCUMENT_ROLE, "content": pair.document},
    ]
    if pair.instruction:
        messages.insert(0, {"role": "system", "content": pair.instruction})
    return tokenizer.render_chat(messages)


def _knows_roles(tokenizer: Tokenizer) -> bool:
    if not tokenizer.has_chat_template:
        return False
    try:
        text = _by_roles(tokenizer, Pair(*_PROBE))
    except RequestError:
        return False
    return all(each in text for each in _PROBE)
