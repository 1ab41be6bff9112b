"""`AsyncLLM`: the Python API for asyncio."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import GenerationRequest, Update
from jaxspec.engine.stats import EngineStats
from jaxspec.llm import BROKEN, CLOSED, Ask, Params, warming_up
from jaxspec.load import load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.prompts import ChatEncoder, Conversation, Prompt, encode
from jaxspec.tree_shape import TreeLike


class AsyncLLM:
    """The model and engine of `LLM` for coroutines: a thread runs the engine, and requests of all coroutines are batched.

    Use it as `async with AsyncLLM() as llm:`, or call `close()`. `await llm.warm_up()` compiles what requests would wait for.
    Arguments and errors are those of LLM.

    In:  async for update in llm.generate("def main():", SamplingParams(max_tokens=8)): print(update.text, end="")
    """

    def __init__(self, *arguments, **options):
        models = load_models(*arguments, **options)
        self.model_name, self.tokenizer, self._progress = models.name, models.tokenizer, models.progress
        self._thread = EngineThread(models.engine, closed=CLOSED, broken=BROKEN)
        self._chats = ChatEncoder(self.tokenizer)
        self._running: dict[str, list[str]] = {}
        """The engine's ids of the completions of each unfinished request."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        tree: TreeLike | None = None,
    ) -> AsyncIterator[Update]:
        """Completes one prompt, handing out text and tokens as they come; the last update of a completion carries its output.

        With n > 1 the updates of the completions arrive interleaved; `index` tells them apart. Closing the iterator, or
        cancelling the task, aborts the request.

        Args:
            request_id: its name for `abort`; None: a new one.
            priority: larger is more urgent.
            timeout: seconds after which it ends with finish_reason "timeout".
            tree: its draft tree, the engine's own or one of its request_trees. None: the engine chooses.

        Raises:
            ValueError: the prompt or its parameters can't be served.
            QueueFull: too many requests wait already.
            EngineError: the engine failed on the request, or it is closed.
        """
        ask = partial(GenerationRequest, priority=priority, timeout=timeout, tree=tree)
        return self._run(partial(encode, self.tokenizer, prompt), ask, sampling_params, request_id)

    def chat(
        self,
        messages: Conversation,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        tree: TreeLike | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Update]:
        """Answers a conversation in the model's chat template; otherwise as `generate`."""
        ask = partial(GenerationRequest, priority=priority, timeout=timeout, tree=tree)
        return self._run(partial(self._chats.encode, messages, chat_template_kwargs), ask, sampling_params, request_id)

    async def _run(
        self, encoded: Callable[[], list[int]], ask: Ask, sampling_params: Params | None, request_id: str | None
    ) -> AsyncIterator[Update]:
        self._thread.check_open()
        copies = SamplingParams.of(sampling_params).copies()
        name = uuid.uuid4().hex if request_id is None else request_id
        if name in self._running:
            raise ValueError(f"request_id {name!r} is in use by an unfinished request: choose another")
        names = [name] if len(copies) == 1 else [f"{name}-{index}" for index in range(len(copies))]
        self._running[name] = names
        try:
            with self._thread.starting(names):  # it may be ended while its prompt is encoded
                prompt = tuple(await asyncio.to_thread(encoded))
                started = await Generation.start(self._thread, [ask(prompt, copy) for copy in copies], names)
            with started as generation:
                async for update in generation:
                    index = names.index(update.request_id)
                    yield replace(update, index=index, output=update.output and replace(update.output, index=index))
        finally:
            del self._running[name]

    async def abort(self, request_id: str) -> bool:
        """Ends a request, with all its completions: its iterator gets the output so far, with finish_reason "abort".

        Returns False if no running request has this id.
        """
        return await asyncio.wrap_future(self._thread.abort(self._running.get(request_id, ()))) > 0

    async def warm_up(self, *, wait_for_all: bool = True, progress: bool | None = None) -> float:
        """As LLM.warm_up. Requests that are made meanwhile wait."""
        shown = self._progress if progress is None else progress
        with warming_up(self._thread, wait_for_all=wait_for_all, progress=shown) as seconds:
            return await asyncio.wrap_future(seconds)

    def stats(self) -> EngineStats:
        """Totals since the start, and the load after the last step."""
        return self._thread.stats

    def close(self) -> None:
        """Ends what is running and frees the memory. May be called twice."""
        self._thread.close()
        self._chats.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
