"""A worker of NVIDIA's Dynamo: `python -m jaxspec.serve_dynamo --model-path DIR` (docs/fleet.md).

Dynamo's frontend answers HTTP, applies the chat template, finds stop strings and chooses a worker; the worker gets token ids and
answers with token ids. Arguments are those of `jaxspec serve`, without what the frontend does, and Dynamo's own. Dynamo is no
dependency of ours: docs/fleet.md says how to install it.
"""

import argparse
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import fields
from typing import Any, Self

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.llm.exceptions import InvalidArgument

from jaxspec.commands.options import OPTIONS
from jaxspec.commands.serve_options import ServerArguments, parse_arguments
from jaxspec.engine.driver import EngineThread
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import GenerationRequest, TokenLogprob, Update
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve import Loaded, load_all, log_settings
from jaxspec.server.logs import configure_logging

NAMES = frozenset(each.name for each in fields(SamplingParams))
CONSTRAINTS = {
    "json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice", "structural_tag": "structural_tag",
}  # fmt: skip
"""Dynamo's names of what constrains a text, and ours."""
FRONTENDS = "Dynamo's frontend does this"
NOT_HERE = {
    **dict.fromkeys(("dp_size", "nnodes"), "a worker is one process: start several"),
    **dict.fromkeys(("host", "port", "allowed_origins", "strict_model_name", "no_tokenizer_info", "shutdown_timeout"), FRONTENDS),
    **dict.fromkeys(("chat_template", "tool_call_parser", "reasoning_parser"), FRONTENDS),
    **dict.fromkeys(("api_key", "admin_api_key"), f"{FRONTENDS}, if anything does; leave out the variable, too"),
}
"""Options of the server that have no meaning here, and why."""
FINISHED = {"abort": "cancelled", "timeout": "cancelled"}
"""Dynamo's names of finish reasons, where they are not ours."""


class DynamoWorker(LLMEngine):
    """One engine, whose programs are compiled before Dynamo tells anybody of this worker."""

    def __init__(self, loaded: Loaded, arguments: ServerArguments, closing: contextlib.ExitStack):
        """`closing`: closes what was loaded."""
        self._thread, self._events, self._closing = EngineThread(loaded.models.engine), arguments.kv_events, closing
        closing.callback(self._thread.close)
        self.registration = registration(loaded, arguments)
        self._defaults, self._timeout = loaded.sampling_defaults, arguments.settings.request_timeout
        self._running: dict[str, list[str]] = {}
        """The engine's ids of the completions of each request."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Loads the model, as Dynamo must know its directory. Raises SystemExit for a wrong argument, and ValueError, OSError or
        ProgramError as the server's start."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        DynamoRuntimeArgGroup().add_arguments(parser)
        given, ours = parser.parse_known_args(argv)
        runtime = DynamoRuntimeConfig.from_cli_args(given)
        runtime.validate()
        arguments = parse_arguments(ours, prog="jaxspec.serve_dynamo")
        for name in filter(arguments.given.__contains__, NOT_HERE):
            raise SystemExit(f"jaxspec.serve_dynamo: {OPTIONS[name].flag} has no meaning here: {NOT_HERE[name]}")
        configure_logging(arguments.log_level)
        log_settings(arguments)
        closing = contextlib.ExitStack()
        worker = cls(load_all(arguments, closing), arguments, closing)
        made = worker.registration
        return worker, WorkerConfig.from_runtime_config(runtime, made.model, made.served_model_name)

    async def start(self, worker_id: int) -> EngineConfig:
        return self.registration

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Where the frontend's router learns what the prefix cache holds."""
        events = self._events
        return [ZmqSource(events.endpoint.replace("*", "127.0.0.1"), events.topic)] if events.is_on else []

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The tokens of one request, as they come. Raises InvalidArgument if it can't be served."""
        prompt, name = tuple(request["token_ids"]), context.id()
        try:
            try:
                copies = params_of(request, self.registration.llm.context_length, self._defaults).copies()
                requests = [GenerationRequest(prompt, each, timeout=self._timeout) for each in copies]
                self._running[name] = names = [f"{name}-{index}" for index in range(len(copies))]
                started = await Generation.start(self._thread, requests, names)
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
            with started as generation:
                async for update in generation:
                    yield chunk(update, names.index(update.request_id))
        finally:
            self._running.pop(name, None)

    async def abort(self, context: Any) -> None:
        """The client has gone, or the frontend has seen a stop string."""
        self._thread.abort(self._running.pop(context.id(), ()))

    async def cleanup(self) -> None:
        self._closing.close()


def registration(loaded: Loaded, arguments: ServerArguments) -> EngineConfig:
    """What the frontend must know of the model and of this worker. Raises ValueError for a model without a tokenizer."""
    models = loaded.models
    if models.tokenizer is None:
        raise ValueError("Dynamo's frontend needs the tokenizer.json of the model's directory, and there is none")
    config, stats = models.engine.config, models.engine.stats()
    name, *others = arguments.served_model_names or (models.name,)
    sizes = LlmRegistration(
        context_length=models.longest,
        kv_cache_block_size=stats.page_size,
        total_kv_blocks=stats.total_pages,
        max_num_seqs=config.max_running_requests,
        max_num_batched_tokens=config.prefill_chunk,
    )
    return EngineConfig(str(models.directory.resolve()), served_model_name=name, llm=sizes, model_aliases=others)


def params_of(request: Mapping[str, Any], context_length: int, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Dynamo's options by our names; those that we don't have are left out, as are stop strings, which the frontend finds itself.
    `defaults`: of the model.

    Raises ValueError for a wrong value.

    In:  {"token_ids": [5], "sampling_options": {"temperature": 0.5}, "stop_conditions": {"stop_token_ids_hidden": [2]}}, 10
    Out: SamplingParams(temperature=0.5, max_tokens=9, stop_token_ids=[2])
    """
    sampling, stop, output = (request.get(name) or {} for name in ("sampling_options", "stop_conditions", "output_options"))
    options = {**output, **sampling, **stop, "stop": None}
    given = {**(defaults or {}), **{name: value for name, value in options.items() if name in NAMES and value is not None}}
    given.setdefault("max_tokens", max(1, context_length - len(request["token_ids"])))
    given["stop_token_ids"] = sorted({*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())})
    guided = sampling.get("guided_decoding") or {}
    given |= {ours: guided[name] for name, ours in CONSTRAINTS.items() if guided.get(name) is not None}
    return SamplingParams(**given)


def chunk(update: Update, index: int) -> dict[str, Any]:
    """An update as Dynamo passes it on."""
    made: dict[str, Any] = {"token_ids": list(update.token_ids), "index": index}
    if update.logprobs is not None:
        made["log_probs"] = [each.logprob for each in update.logprobs]
        made["top_logprobs"] = [ranked(each) for each in update.logprobs]
    if (output := update.output) is not None:
        prompt, completion = len(output.prompt_token_ids), len(output.token_ids)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        usage["prompt_tokens_details"] = {"cached_tokens": output.cached_tokens}
        made |= {"finish_reason": FINISHED.get(output.finish_reason, output.finish_reason), "completion_usage": usage}
    return made


def ranked(token: TokenLogprob) -> list[dict[str, Any]]:
    """The most likely tokens, best first."""
    return [{"rank": place, "token_id": each, "logprob": value} for place, (each, value) in enumerate(token.top, 1)]


if __name__ == "__main__":
    run(DynamoWorker)
