"""What is done with each Python client: a question, a call of a tool, its result, a stream.

A scenario gets the address of a server and returns nothing: what the client sends is recorded on
the way. The client itself reads each answer, so one that it cannot read fails here. Packages of
clients are imported by name, where they are used: no machine has all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from typing import Any, Literal

MODEL = "builtin"
QUESTION = "How is the weather in Paris?"
RESULT = "Rain, 12 degrees"
LIMIT = 60  # tokens of an answer
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": ARGUMENTS,
    },
}
FORCED = {"type": "function", "function": {"name": "weather"}}
MESSAGES_TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": ARGUMENTS,
}


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"{RESULT} in {city}"


def _arguments() -> Any:
    """The arguments of `weather` as a class, for clients that make the schema themselves."""
    pydantic = _package("pydantic")
    only = pydantic.ConfigDict(extra="forbid")
    return pydantic.create_model("weather", city=(Literal["Paris", "Rome"], ...), __config__=only)


def _package(name: str) -> Any:
    return importlib.import_module(name)


def openai_sdk(url: str) -> None:
    """Chat, completions and responses with the official client."""
    package = _package("openai")
    client = package.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    common = {"model": MODEL, "max_completion_tokens": LIMIT}
    first = client.chat.completions.create(
        messages=turns, tools=[CHAT_TOOL], tool_choice=FORCED, **common
    )
    message = first.choices[0].message
    turns += [message, _result_of(message.tool_calls[0].id)]
    client.chat.completions.create(messages=turns, tools=[CHAT_TOOL], **common)
    streaming = client.chat.completions.stream(messages=turns, tools=[CHAT_TOOL], **common)
    # The helper raises where the limit ends an answer, once it has read all of it.
    with contextlib.suppress(package.LengthFinishReasonError), streaming as stream:
        stream.get_final_completion()
    chunks = client.chat.completions.create(
        messages=turns[:1], stream=True, stream_options={"include_usage": True}, **common
    )
    assert [chunk.usage for chunk in chunks][-1].completion_tokens
    list(client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=LIMIT, stream=True))
    _openai_responses(client)
    client.models.list()


def _result_of(call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": RESULT}


def _openai_responses(client: Any) -> None:
    tool = {"type": "function", "strict": True} | CHAT_TOOL["function"]
    common = {"model": MODEL, "max_output_tokens": LIMIT, "tools": [tool]}
    choice = {"type": "function", "name": "weather"}
    first = client.responses.create(input=QUESTION, tool_choice=choice, **common)
    (call,) = (item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    turns = [{"role": "user", "content": QUESTION}, *first.output, result]
    client.responses.create(input=turns, store=False, **common)
    client.responses.create(input=[result], previous_response_id=first.id, **common)
    with client.responses.stream(input=turns, reasoning={"effort": "low"}, **common) as stream:
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete"), last.type


def anthropic_sdk(url: str) -> None:
    """Messages with the official client."""
    client = _package("anthropic").Anthropic(base_url=url, api_key="none", max_retries=0)
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = {"model": MODEL, "tools": [MESSAGES_TOOL], "system": "Be brief."}
    choice = {"type": "tool", "name": "weather"}
    first = client.messages.create(messages=turns, tool_choice=choice, max_tokens=LIMIT, **tools)
    (call,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    turns += [{"role": "assistant", "content": first.content}]
    turns += [{"role": "user", "content": [result]}]
    client.messages.create(messages=turns, max_tokens=LIMIT, **tools)
    with client.messages.stream(messages=turns, max_tokens=LIMIT, **tools) as stream:
        assert stream.get_final_message().usage.output_tokens
    client.messages.count_tokens(messages=turns, **tools)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    client.messages.create(
        model=MODEL, messages=turns[:1], max_tokens=1025, thinking=thinking, stop_sequences=["."]
    )


def litellm(url: str) -> None:
    """LiteLLM in its ways to such a server: openai/, hosted_vllm/, anthropic/, responses."""
    package = _package("litellm")
    for provider, base in (
        ("openai", f"{url}/v1"),
        ("hosted_vllm", f"{url}/v1"),
        ("anthropic", url),
    ):
        common: dict[str, Any] = {
            "model": f"{provider}/{MODEL}",
            "api_base": base,
            "api_key": "none",
        }
        common |= {"max_tokens": LIMIT, "tools": [CHAT_TOOL]}
        turns: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
        ]
        first = package.completion(messages=turns, tool_choice=FORCED, **common)
        message = first.choices[0].message
        turns += [message, _result_of(message.tool_calls[0].id)]
        package.completion(messages=turns, **common)
        # As the proxy of LiteLLM sends an answer back: all that it knows of it.
        turns[2] = message.model_dump() | {"provider_specific_fields": {"refusal": None}}
        chunks = list(
            package.completion(
                messages=turns, stream=True, stream_options={"include_usage": True}, **common
            )
        )
        assert chunks
    to_chat = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    package.responses(input=QUESTION, max_output_tokens=LIMIT, **to_chat)
    list(package.responses(input=QUESTION, max_output_tokens=LIMIT, stream=True, **to_chat))
    package.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt=QUESTION,
        max_tokens=LIMIT,
        api_base=f"{url}/v1",
        api_key="none",
    )


def langchain_openai(url: str) -> None:
    """ChatOpenAI over chat completions and over responses: tools, a stream, a structure."""
    chat_class = _package("langchain_openai").ChatOpenAI
    common = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    for over_responses in (False, True):
        chat = chat_class(max_tokens=LIMIT, use_responses_api=over_responses, **common)
        _langchain(chat)
    shaped = chat_class(temperature=0, **common).with_structured_output(
        ARGUMENTS | {"title": "Place"}, method="json_schema"
    )
    assert shaped.invoke("Where?")["city"] in ("Paris", "Rome")


def langchain_anthropic(url: str) -> None:
    """ChatAnthropic: tools and a stream."""
    chat_class = _package("langchain_anthropic").ChatAnthropic
    _langchain(chat_class(model=MODEL, base_url=url, api_key="none", max_tokens=LIMIT))


def _langchain(chat: Any) -> None:
    messages = _package("langchain_core.messages")
    tool = _package("langchain_core.tools").tool(weather, args_schema=_arguments())
    turns: list[Any] = [messages.SystemMessage("Be brief."), messages.HumanMessage(QUESTION)]
    first = chat.bind_tools([tool], tool_choice="weather", strict=True).invoke(turns)
    (call,) = first.tool_calls
    turns += [first, messages.ToolMessage(RESULT, tool_call_id=call["id"])]
    chat.bind_tools([tool]).invoke(turns)
    assert list(chat.bind_tools([tool]).stream(turns))


def llama_index(url: str) -> None:
    """OpenAILike, which is for servers with OpenAI's API: tools, a stream, a completion."""
    like = _package("llama_index.llms.openai_like").OpenAILike
    core = _package("llama_index.core.llms")
    tool = _package("llama_index.core.tools").FunctionTool
    tool = tool.from_defaults(weather, fn_schema=_arguments())
    common = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "max_tokens": LIMIT}
    chat = like(is_chat_model=True, is_function_calling_model=True, max_retries=0, **common)
    turns = [core.ChatMessage(role="user", content=QUESTION)]
    first = chat.chat_with_tools([tool], chat_history=turns, tool_required=True)
    (call,) = chat.get_tool_calls_from_response(first)
    extra = {"tool_call_id": call.tool_id, "name": call.tool_name}
    turns += [first.message, core.ChatMessage(role="tool", content=RESULT, additional_kwargs=extra)]
    chat.chat_with_tools([tool], chat_history=turns)
    assert list(chat.stream_chat(turns))
    like(is_chat_model=False, **common).complete(QUESTION)


def openai_agents(url: str) -> None:
    """A run of an agent that calls a tool, over chat completions and over responses."""
    agents = _package("agents")
    agents.set_tracing_disabled(True)
    client = _package("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool = agents.function_tool(weather)
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    for model_class in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = model_class(model=MODEL, openai_client=client)
        agent = agents.Agent(
            name="a", instructions="Be brief.", model=model, tools=[tool], model_settings=settings
        )
        asyncio.run(_run_agent(agents, agent))


async def _run_agent(agents: Any, agent: Any) -> None:
    await agents.Runner.run(agent, QUESTION, max_turns=3)
    streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
    async for _ in streamed.stream_events():
        pass


def instructor(url: str) -> None:
    """An answer as an object, by a tool and by a JSON schema."""
    package = _package("instructor")
    place = _arguments()
    plain = _package("openai").OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for mode in (package.Mode.TOOLS, package.Mode.JSON_SCHEMA):
        client = package.from_openai(plain, mode=mode)
        turns = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(
            model=MODEL, messages=turns, response_model=place, max_tokens=200, max_retries=1
        )
        assert json.loads(answer.model_dump_json())["city"]


SCENARIOS = {
    "openai": openai_sdk,
    "anthropic": anthropic_sdk,
    "litellm": litellm,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "llama-index-llms-openai-like": llama_index,
    "openai-agents": openai_agents,
    "instructor": instructor,
}
