"""Prompts to token ids, for all front ends: checks, the chat template, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.deployments.ingress.core.call import Call, ChatPrompt, ServedModel
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.core.tools import as_plain_messages
from penstock.deployments.ingress.core.validation import (
    bad_words_ids,
    check_ids,
    check_messages,
    check_text,
    check_variables,
)
from penstock.workers.request import RequestError
from penstock.workers.text.tokenizer import Tokenizer

TEXT_SLACK = 4  # normalising may shrink a text by this factor before it becomes tokens


class PromptReader:
    """Reads prompts as one model's tokenizer does. Lives on one event loop."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    async def ids(self, call: Call, model: ServedModel, max_tokens: int) -> tuple[int, ...]:
        """The prompt of `call` as the model would read it. Raises RequestError, also for a text
        that cannot be as short as `max_tokens`."""
        prompt = call.prompt
        if isinstance(prompt, tuple):
            check_ids(prompt, model.vocab_size, "prompt")
            return prompt
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            if not prompt:  # a tokenizer may begin even that with a mark
                raise RequestError("the prompt is empty", param="prompt")
            num_chars = len(prompt)
        else:
            check_messages(prompt.messages)
            if prompt.variables:
                check_variables(prompt.variables, self._tokenizer.template_variables)
            num_chars = sum(len(message["content"]) for message in prompt.messages)
            num_chars += 0 if prompt.tools is None else prompt.tools.num_chars
        if num_chars > max_tokens * self._tokenizer.max_token_bytes * TEXT_SLACK:
            raise RequestError(
                f"a prompt of {num_chars} characters cannot fit the {max_tokens} tokens "
                "that this model takes",
                param="prompt" if isinstance(prompt, str) else "messages",
                code="context_length_exceeded",
            )
        return await run_off_loop_if_large(num_chars, self._encode, call)

    async def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell `words`. Raises RequestError."""
        for word in words:
            check_text(word, "bad_words")
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return await run_off_loop_if_large(sum(map(len, words)), bad_words_ids, words, encode)

    def _encode(self, call: Call) -> tuple[int, ...]:
        if isinstance(call.prompt, ChatPrompt):
            messages = [_for_template(message) for message in call.prompt.messages]
            toolset, tools = call.prompt.tools, None
            if not self._tokenizer.renders_tools:
                messages = as_plain_messages(messages, toolset)
            elif toolset is not None:
                tools = [tool.as_json() for tool in toolset.tools]
            text = self._tokenizer.render_chat(
                messages,
                add_generation_prompt=call.prompt.add_generation_prompt,
                tools=tools,
                variables=call.prompt.variables,
            )
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        assert isinstance(call.prompt, str)
        ids = self._tokenizer.encode(
            call.prompt, add_special_tokens=call.options.add_special_tokens
        )
        return tuple(ids)


def _for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates know 'system'; 'developer' is OpenAI's newer name for it."""
    return {**message, "role": "system"} if message["role"] == "developer" else message
