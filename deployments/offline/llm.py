"""`penstock.LLM`: a model in this process, for scripts and notebooks, in vLLM's shape.

    with LLM("builtin") as llm:
        for output in llm.generate(["The river", "A lamp"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The engine and its request core run on an event loop of their own, on another thread. So LLM works
where a loop already runs, as in a notebook, and from several threads at once.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from typing import Any, Self, TypeVar

from tqdm import tqdm

from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.config import settings as server_settings
from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, ChatPrompt
from penstock.deployments.ingress.core.embeddings.embed import (
    MAX_INPUTS,
    EmbeddingCall,
    embed,
    embedding_call,
)
from penstock.deployments.ingress.core.errors import CATALOGUE, ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.local_engine import LocalEngine, load_core
from penstock.deployments.offline.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from penstock.deployments.offline.prompts import (
    Message,
    Prompt,
    calls,
    conversation_list,
    naming,
    places,
    prompt_list,
)
from penstock.deployments.offline.sampling_params import SamplingParams
from penstock.deployments.offline.tokenizer import LLMTokenizer
from penstock.deployments.vllm_names.flag import translated
from penstock.deployments.vllm_names.table import BY_NAME
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError
from penstock.workers.settings import settings_of, unknown_setting

STEPS_AHEAD = 4  # requests handed to the engine: this many times what one step takes
T = TypeVar("T")


class GenerationError(RuntimeError):
    """Some prompts were not answered: the engine failed at them, or refused them while it ran.

    `outputs` has the results of the other prompts, and None for those that were not answered.
    """

    def __init__(self, message: str, outputs: list[RequestOutput | None]):
        super().__init__(message)
        self.outputs = outputs


class LLM:
    """A loaded model. A context manager; `close` frees it, and so does the end of the process."""

    def __init__(self, model: str = "builtin", **settings: Any):
        """`model`: as of `penstock serve`. `settings`: of the engine, by the names in
        docs/reference/settings.md, or by vLLM's (docs/reference/vllm.md). Raises ConfigError or
        LoadError."""
        self._config = config_from({**_engine_settings(settings), "model": model})
        self._host = _Host()
        self._close = weakref.finalize(self, self._host.close)
        try:
            self._host.load(self._config)
        except BaseException:
            self._close()
            raise
        (self._model,) = self._host.core.models()

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._model.max_model_len

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer, with its chat template."""
        tokenizer, reader = self._host.core.reader()

        def render(prompt: ChatPrompt) -> str:
            reader.check(prompt)
            return reader.render(prompt)

        return LLMTokenizer(tokenizer, render)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model. Calls that run on other threads end with a RuntimeError."""
        self._close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results have the order of the prompts.

        `prompts`: one or a list of text, token ids, or mappings with "prompt" or
        "prompt_token_ids". `sampling_params`: for all, or a list of one each. All are checked
        before the first is computed. Raises RequestError, which names the index of the first bad
        one, and GenerationError.
        """
        read, is_list = prompt_list(prompts)
        made, num_choices = calls(read, sampling_params, self._model)
        names = places("prompts", is_list, len(made))
        return self._host.run(self._answer(made, num_choices, names, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them; otherwise as `generate`.

        A conversation is a list of messages with `role` and `content`. A model's reasoning is part
        of the text of its answer. `chat_template_kwargs`: variables of the chat template.
        """
        read, is_list = conversation_list(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs and dict(chat_template_kwargs),
        )
        made, num_choices = calls(read, sampling_params, self._model)
        names = places("conversations", is_list, len(made))
        return self._host.run(self._answer(made, num_choices, names, use_tqdm))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order; its length is 1 with `normalize`.

        `prompts`: as for `generate`. `dimensions`: how many numbers of it are kept; None: all.
        Raises RequestError, which names the index of the first bad one, and ServiceError where the
        engine fails.
        """
        read, is_list = prompt_list(prompts)
        names = places("prompts", True, len(read)) if is_list else ["prompts"]
        calls = [
            embedding_call(
                read[i : i + MAX_INPUTS],
                names[i : i + MAX_INPUTS],
                CallOptions(),
                CallContext(),
                dimensions=dimensions,
                normalize=normalize,
            )
            for i in range(0, len(read), MAX_INPUTS)
        ]
        return self._host.run(self._embed(calls, len(read), use_tqdm))

    async def _embed(
        self, calls: list[EmbeddingCall], num_prompts: int, use_tqdm: bool
    ) -> list[EmbeddingRequestOutput]:
        engine = self._config.engine
        most = min(STEPS_AHEAD * engine.max_num_seqs, engine.max_waiting)
        outputs = []
        with tqdm(total=num_prompts, desc="prompts", unit="prompt", disable=not use_tqdm) as bar:
            for call in calls:
                found = await embed(self._host.core, call, most)
                for prompt, vector in zip(call.inputs, found.vectors, strict=True):
                    text = prompt if isinstance(prompt, str) else None
                    vector_output = EmbeddingOutput(vector.tolist())
                    outputs.append(EmbeddingRequestOutput(text, vector_output))
                bar.update(len(call.inputs))
        return outputs

    async def _answer(
        self, made: list[Call], num_choices: list[int], names: list[str], use_tqdm: bool
    ) -> list[RequestOutput]:
        core, engine = self._host.core, self._config.engine
        prepared: list[list[Generation]] = []
        for call, num, name in zip(made, num_choices, names):
            with naming(name):
                prepared.append(await core.prepare_choices(call, num))
        most = min(STEPS_AHEAD * engine.max_num_seqs, engine.max_waiting)
        num_at_once = max(1, most // max(num_choices, default=1))
        outputs: list[RequestOutput | None] = [None] * len(made)
        failures: dict[int, str] = {}
        bar = tqdm(total=len(made), desc="prompts", unit="prompt", disable=not use_tqdm)
        todo = iter(range(len(made)))

        async def answer_some() -> None:
            for i in todo:
                try:
                    outputs[i] = await self._one(prepared[i])
                except (RequestError, ServiceError) as error:
                    if not core.ready():
                        raise RuntimeError(
                            "the engine has failed, and the log has the cause; make a new LLM"
                        ) from error
                    failures[i] = _reason(error)
                prepared[i].clear()
                bar.update()

        with bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_at_once, len(made))):
                    group.create_task(answer_some())
        if failures:
            index, message = min(failures.items())
            where = f"{names[index]}: " if names[index] else ""
            rest = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
            raise GenerationError(f"not answered: {where}{message}{rest}", outputs)
        return [output for output in outputs if output is not None]

    async def _one(self, generations: list[Generation]) -> RequestOutput:
        output = RequestOutput.of(generations)
        async with aclosing(self._host.core.run_many(generations)) as pieces:
            async for index, piece in pieces:
                output.add(index, piece)
        return output


def _engine_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by our names. Raises ConfigError for those that an engine does not have."""
    of_engine = {setting.name for setting in settings_of(EngineConfig)}
    of_server = {setting.name for setting in server_settings()} - of_engine
    found = translated(given, frozenset(of_engine | of_server), BY_NAME)
    for name in found:
        if name in of_server:
            raise ConfigError(f"{name} is a setting of a server; LLM has none, so leave it out")
        if name not in of_engine:
            raise unknown_setting(name, of_engine)
    return found


def _reason(error: RequestError | ServiceError) -> str:
    """Why a prompt was not answered."""
    if isinstance(error, RequestError):
        return error.message
    return f"{error.code} ({error.message or CATALOGUE[error.code].message})"


class _Host:
    """The event loop with the engine and its request core, and the thread of all three.

    Does not refer to the LLM, so that an LLM without references is freed.
    """

    core: RequestCore  # once `load` has returned
    _engine: LocalEngine

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-llm", daemon=True
        )
        self._thread.start()

    def load(self, config: ServeConfig) -> None:
        async def on_loop() -> None:
            self.core, self._engine = load_core(config)

        self.run(on_loop())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result. Interrupting the caller cancels `work`."""
        if self._is_closed:
            work.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this LLM was closed before it had answered") from None
        except BaseExceptionGroup as group:  # of the tasks that share the prompts
            raise group.exceptions[0] from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_engine"):
            self._engine.stop()
