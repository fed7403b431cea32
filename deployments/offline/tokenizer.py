"""The tokenizer of an `LLM`, by the names that scripts know from transformers' tokenizers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from penstock.deployments.ingress.core.call import ChatPrompt
from penstock.deployments.offline.prompts import Message, conversation_list
from penstock.workers.text.tokenizer import Tokenizer


class LLMTokenizer:
    """Text as the model reads it. It stays usable when the LLM is closed.

    `render` writes a conversation as the model's chat template does, as for `LLM.chat`.
    """

    def __init__(self, tokenizer: Tokenizer, render: Callable[[ChatPrompt], str]):
        self._tokenizer, self._render = tokenizer, render

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the tokenizer names one."""
        return self._tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an answer: the first one, if the model has several."""
        return next(iter(self._tokenizer.eos_token_ids), None)

    @property
    def chat_template(self) -> str | None:
        """Its source, in Jinja."""
        return self._tokenizer.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with those special tokens that the model wants around it."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of one or several tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else map(operator.index, token_ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: Literal[True] = ...,
        add_generation_prompt: bool = ...,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = ...,
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt that `LLM.chat` makes of a conversation: token ids, or its text.

        `variables`: of the chat template. Pass ids on to `LLM.generate`, which would put the
        model's first special token before a text once more. Raises RequestError.
        """
        (prompt,), _ = conversation_list(
            conversation,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=variables or None,
        )
        text = self._render(prompt)
        return self.encode(text, add_special_tokens=False) if tokenize else text
