"""The arguments of `LLM` as Calls of the request core: prompts, conversations, sampling parameters.

Parsed by the pydantic models of the HTTP API, so that both refuse the same input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from penstock.deployments.ingress.core.call import Call, ChatPrompt, ServedModel
from penstock.deployments.ingress.http.body import validated
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.deployments.offline.sampling_params import SamplingParams
from penstock.workers.request import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping: "prompt" or "prompt_token_ids"
Message = Mapping[str, Any]  # role, content
T = TypeVar("T")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix the message of each RequestError with `where`, unless that is ""."""
    try:
        yield
    except RequestError as error:
        if not where:
            raise
        message = f"{where}: {error.message}"
        raise RequestError(message, param=error.param, code=error.code) from None


def places(name: str, is_list: bool, num: int) -> list[str]:
    """The names of `num` items in errors: `name`[index], or "" for one that is no list."""
    return [f"{name}[{i}]" for i in range(num)] if is_list else [""]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> tuple[list[str | tuple[int, ...]], bool]:
    """The prompts as text or token ids, and whether it was a list of them. Raises RequestError."""
    if isinstance(prompts, str | Mapping) or (_is_list(prompts) and _begins_with_id(prompts)):
        return [_prompt(prompts)], False
    if not _is_list(prompts):
        raise RequestError(f"prompts {_WANTED}, or a list of these; got {_kind(prompts)}")
    return _each(prompts, "prompts", _prompt), True


def conversation_list(
    messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any
) -> tuple[list[ChatPrompt], bool]:
    """The conversations, and whether it was a list of them. Raises RequestError.

    `options`: add_generation_prompt and chat_template_kwargs, as in bodies of the HTTP API.
    """
    if not _is_list(messages):
        raise RequestError(
            f"messages must be a list of messages, or a list of such lists; got {_kind(messages)}"
        )

    def conversation(given: Any) -> ChatPrompt:
        if not _is_list(given):
            raise RequestError(f"a conversation must be a list of messages; got {_kind(given)}")
        rows = [dict(each) if isinstance(each, Mapping) else each for each in given]
        values = ChatCompletionRequest.cleaned({"messages": rows, **options})
        return validated(ChatCompletionRequest, values).prompt()

    if messages and isinstance(messages[0], Mapping):
        return [conversation(messages)], False
    return _each(messages, "conversations", conversation), True


def calls(
    prompts: Sequence[str | tuple[int, ...] | ChatPrompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    model: ServedModel,
) -> tuple[list[Call], list[int]]:
    """A Call for each prompt, and how many answers each shall have. Raises RequestError."""
    given = SamplingParams() if sampling is None else sampling
    if isinstance(given, SamplingParams):
        call, num_choices = _call(given, model, "sampling_params")
        made = [Call(each, call.params, call.options) for each in prompts]
        return made, [num_choices] * len(prompts)
    if not _is_list(given) or not all(isinstance(each, SamplingParams) for each in given):
        raise RequestError(
            "sampling_params must be a penstock.SamplingParams, or a list of one for each prompt; "
            f"got {_kind(given)}"
        )
    if len(given) != len(prompts):
        raise RequestError(f"sampling_params has {len(given)} entries for {len(prompts)} prompts")
    found = [_call(each, model, f"sampling_params[{i}]") for i, each in enumerate(given)]
    made = [Call(each, call.params, call.options) for each, (call, _) in zip(prompts, found)]
    return made, [num_choices for _, num_choices in found]


def _call(given: SamplingParams, model: ServedModel, where: str) -> tuple[Call, int]:
    """A Call without its prompt, and its number of answers."""
    with naming(where):
        body = validated(CompletionRequest, {"prompt": "", **given.body()})
        params = replace(body.params(model.sampling_defaults), max_tokens=body.max_tokens)
        params.check(model.vocab_size)
        return Call("", params, body.options()), body.num_choices


_WANTED = "must be a text, token ids, or a mapping with 'prompt' or 'prompt_token_ids'"


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, Mapping):
        if len(given) != 1 or next(iter(given)) not in ("prompt", "prompt_token_ids"):
            shown = ", ".join(map(repr, list(given)[:5]))
            raise RequestError(f"a prompt {_WANTED}; got a mapping with {shown or 'no keys'}")
        (given,) = given.values()
    if isinstance(given, str):
        return given
    if not _is_list(given):
        raise RequestError(f"a prompt {_WANTED}; got {_kind(given)}")
    try:
        if any(isinstance(each, bool) for each in given):
            raise TypeError
        return tuple(map(operator.index, given))
    except TypeError:
        raise RequestError("token ids must be integers") from None


def _each(given: Sequence[Any], name: str, read: Callable[[Any], T]) -> list[T]:
    found = []
    for i, each in enumerate(given):
        with naming(f"{name}[{i}]"):
            found.append(read(each))
    return found


def _is_list(given: Any) -> bool:
    """Whether `given` is a sequence; arrays and columns of tables are."""
    return not isinstance(given, str | bytes | Mapping) and hasattr(given, "__getitem__")


def _begins_with_id(given: Any) -> bool:
    return len(given) > 0 and hasattr(given[0], "__index__")


def _kind(given: Any) -> str:
    return type(given).__name__
