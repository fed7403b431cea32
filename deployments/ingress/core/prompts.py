"""Prompts as the engine takes them: checked, rendered by the chat template, tokenised."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport
from penstock.deployments.ingress.core.call import Call, ChatPrompt, ServedModel
from penstock.deployments.ingress.core.text_pool import TextPool
from penstock.deployments.ingress.core.tools import as_plain_messages
from penstock.deployments.ingress.core.validation import AS_MANY_AS_FIT, check_ids, check_text
from penstock.workers.request import RequestError, SamplingParams, check_input_length
from penstock.workers.text.pair_template import Pair, PairTemplate
from penstock.workers.text.tokenizer import Tokenizer

MAX_MESSAGES = 2048
MAX_VARIABLES = 16
MAX_VARIABLE_CHARS = 256
VALUE_SIZE = 16  # characters: to render a value or a message takes as long as so much of text
TEXT_SLACK = 4  # normalising may shrink a text by this factor before it becomes tokens
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_variables(variables: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise RequestError unless the chat template reads all these, and they are small."""
    field = "chat_template_kwargs"
    if len(variables) > MAX_VARIABLES:
        raise RequestError(f"{field} takes at most {MAX_VARIABLES} variables", param=field)
    for name, value in variables.items():
        where = f"{field}.{ascii(name[:100])[1:-1]}"
        if name not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise RequestError(
                f"{where}: the chat template of this model has no such variable; {there}",
                param=where,
            )
        if isinstance(value, str):
            check_text(value, where)
            if len(value) > MAX_VARIABLE_CHARS:
                raise RequestError(
                    f"{where} has at most {MAX_VARIABLE_CHARS} characters", param=where
                )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages: send 1 to {MAX_MESSAGES} of them", param="messages")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise RequestError(
                f"messages[{i}].role must be one of {', '.join(ROLES)}", param="messages"
            )
        for text in message.values():
            if isinstance(text, str):
                check_text(text, "messages")
        if message.get("tool_calls"):
            check_text(json.dumps(message["tool_calls"], ensure_ascii=False), "messages")


def bad_words_ids(
    words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `words`, as they read at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        word = word.lstrip(" ")
        bare, spaced = tuple(encode(word)), tuple(encode(" " + word))
        found[bare] = None
        if spaced[-len(bare) :] != bare:  # else it is forbidden already
            found[spaced] = None
    return tuple(found)


class PromptReader:
    """Reads prompts as one model's tokenizer does. Lives on one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TextPool,
        tools: ToolSupport,
        pairs: PairTemplate | None = None,
    ):
        """`pairs`: of a model that scores them; None: it does not."""
        self._tokenizer, self._texts, self._tools = tokenizer, texts, tools
        self._pairs = pairs

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
            num_chars = size = len(prompt)
        elif isinstance(prompt, Pair):
            for text in (prompt.query, prompt.document, prompt.instruction):
                check_text(text, "prompt")
            num_chars = size = len(prompt.query) + len(prompt.document) + len(prompt.instruction)
        else:
            self.check(prompt)
            num_chars = sum(len(message["content"]) for message in prompt.messages)
            num_tool_chars = 0 if prompt.tools is None else prompt.tools.num_chars
            num_chars += num_tool_chars
            # All of it is rendered, or may be: names, reasoning, and arguments of calls, too.
            size = num_tool_chars + _size_of(prompt.messages) + _size_of(prompt.variables)
        if num_chars > max_tokens * self._tokenizer.max_token_bytes * TEXT_SLACK:
            raise RequestError(
                f"a prompt of {num_chars} characters cannot fit the {max_tokens} tokens "
                "that this model takes",
                param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
                code="context_length_exceeded",
            )
        return await self._texts.run(call.context.principal, size, self._encode, call)

    def check(self, prompt: ChatPrompt) -> None:
        """Raise RequestError for messages or variables that the template cannot take."""
        check_messages(prompt.messages)
        if prompt.variables:
            check_variables(prompt.variables, self._tokenizer.template_variables)

    async def fitting_ids(
        self, call: Call, model: ServedModel, params: SamplingParams, max_tokens: int
    ) -> tuple[int, ...]:
        """`ids`, truncated as the call asks, with room for the answer in `max_tokens`."""
        most = call.options.truncate_prompt_tokens
        if most == AS_MANY_AS_FIT:
            num_answer = max(params.max_tokens or 1, params.min_tokens)
            most = max_tokens if call.options.embeds else max(1, max_tokens - num_answer)
            call = replace(call, options=replace(call.options, truncate_prompt_tokens=most))
        prompt_ids = await self.ids(call, model, max_tokens)
        if most is not None and not isinstance(call.prompt, Pair):
            prompt_ids = prompt_ids[-most:]
        if call.options.embeds and prompt_ids:
            check_input_length(len(prompt_ids), max_tokens)
        else:
            _check_length(len(prompt_ids), params, max_tokens)
        return prompt_ids

    async def bad_words_ids(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell the call's `bad_words`. Raises RequestError."""
        words = call.options.bad_words
        for word in words:
            check_text(word, "bad_words")
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        size = sum(map(len, words))
        return await self._texts.run(call.context.principal, size, bad_words_ids, words, encode)

    def _encode(self, call: Call) -> tuple[int, ...]:
        if isinstance(call.prompt, ChatPrompt):
            text = self.render(call.prompt)
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if isinstance(call.prompt, Pair):
            assert self._pairs is not None, "checked by embed"
            return tuple(self._pairs.ids(call.prompt, call.options.truncate_prompt_tokens))
        assert isinstance(call.prompt, str)
        ids = self._tokenizer.encode(
            call.prompt, add_special_tokens=call.options.add_special_tokens
        )
        return tuple(ids)

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a conversation. Raises RequestError."""
        messages = [_for_template(message) for message in prompt.messages]
        toolset, tools = prompt.tools, None
        messages = self._tools.for_template(messages)
        if self._tools.is_plain:
            messages = as_plain_messages(messages, toolset)
        elif toolset is not None:
            tools = [tool.as_json() for tool in toolset.tools]
        return self._tokenizer.render_chat(
            messages,
            add_generation_prompt=prompt.add_generation_prompt,
            tools=tools,
            variables=prompt.variables,
            continues_last=prompt.continues_last,
        )


def _size_of(part: Any) -> int:
    """Characters of all texts in a part of a conversation, and a few for each value."""
    size, left = 0, [part]
    while left:
        value = left.pop()
        size += len(value) if isinstance(value, str) else VALUE_SIZE
        if isinstance(value, Mapping):
            left += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            left += value
    return size


def _for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates know 'system'; 'developer' is OpenAI's newer name for it."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _check_length(num_prompt: int, params: SamplingParams, max_model_len: int) -> None:
    """Raise RequestError unless prompt and answer fit, naming what to lower and to what."""
    room = max_model_len - num_prompt
    if num_prompt == 0:
        raise RequestError("the prompt is empty", param="prompt")
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; this model takes at most {max_model_len} tokens "
            "of prompt and answer together",
            param="prompt",
            code="context_length_exceeded",
        )
    for name in ("max_tokens", "min_tokens"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > room:
            raise RequestError(
                f"the prompt ({num_prompt} tokens) and {name} ({wanted}) exceed the "
                f"{max_model_len} tokens that this model takes; {name} can be at most {room}",
                param=name,
                code="context_length_exceeded",
            )
