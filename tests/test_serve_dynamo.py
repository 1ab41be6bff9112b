"""The worker of Dynamo, with a stand-in for what it uses of Dynamo: what is told of the model, and how requests and answers look.
(With Dynamo's own runtime and frontend it was run by hand: docs/fleet.md.)"""

import argparse
import asyncio
import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxspec.commands.options import OPTIONS
from jaxspec.commands.serve_options import parse_arguments
from jaxspec.config import EngineConfig
from jaxspec.sampling_params import SamplingParams
from tests.server.fakes import CONTEXT, TEXT, FakeEngine


@dataclass
class Registered:
    """What Dynamo's EngineConfig and LlmRegistration hold."""

    model: str = ""
    served_model_name: str | None = None
    llm: Any = None
    model_aliases: list[str] = field(default_factory=list)


class RuntimeOptions:
    """Dynamo's options: one of them."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--namespace", default="dynamo")

    @classmethod
    def from_cli_args(cls, given: argparse.Namespace) -> Any:
        return SimpleNamespace(namespace=given.namespace, validate=lambda: None)

    @classmethod
    def from_runtime_config(cls, runtime: Any, model_name: str, served_model_name: str) -> tuple[str, str, str]:
        return runtime.namespace, model_name, served_model_name


class InvalidArgument(Exception):
    pass


STAND_IN: dict[str, dict[str, Any]] = {
    "common.backend": {
        "EngineConfig": Registered, "LLMEngine": object, "LlmRegistration": SimpleNamespace, "WorkerConfig": RuntimeOptions,
    },
    "common.backend.publisher": {"ZmqSource": lambda *given: given},
    "common.backend.run": {"run": None},
    "common.configuration.groups.runtime_args": {"DynamoRuntimeArgGroup": RuntimeOptions, "DynamoRuntimeConfig": RuntimeOptions},
    "llm.exceptions": {"InvalidArgument": InvalidArgument},
}  # fmt: skip


@pytest.fixture
def serve_dynamo(monkeypatch) -> Iterator[ModuleType]:
    """jaxspec.serve_dynamo, with the stand-in."""
    for name, content in STAND_IN.items():
        parts = ["dynamo", *name.split(".")]
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[f"dynamo.{name}"]).update(content)
    monkeypatch.delitem(sys.modules, "jaxspec.serve_dynamo", raising=False)
    yield importlib.import_module("jaxspec.serve_dynamo")
    sys.modules.pop("jaxspec.serve_dynamo", None)


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.config, made.context_length = EngineConfig(max_running_requests=5), CONTEXT  # type: ignore[attr-defined]
    return made


@pytest.fixture
def loaded(engine) -> Any:
    models = SimpleNamespace(engine=engine, tokenizer=engine.tokenizer, name="fake", directory=Path("/fake"), longest=CONTEXT)
    return SimpleNamespace(models=models, sampling_defaults={"top_k": 7})


@pytest.fixture
def worker(serve_dynamo, loaded) -> Iterator[Any]:
    made = serve_dynamo.DynamoWorker(loaded, parse_arguments([]), ExitStack())
    yield made
    asyncio.run(made.cleanup())
    asyncio.run(made.cleanup())  # Dynamo may call it twice


def ask(worker: Any, **request: Any) -> list[dict]:
    async def answer() -> list[dict]:
        return [each async for each in worker.generate({"token_ids": [1, 2], **request}, SimpleNamespace(id=lambda: "a"))]

    return asyncio.run(answer())


def test_dynamo_is_told_what_it_must_know_of_the_model(serve_dynamo, loaded, monkeypatch):
    monkeypatch.setattr(serve_dynamo, "load_all", lambda *_: loaded)
    monkeypatch.setattr(serve_dynamo, "configure_logging", lambda _: None)
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": "kv"}'
    argv = ["--namespace", "ours", "--served-model-name", "a", "b", "--kv-events-config", events]

    async def start() -> tuple[Any, ...]:
        made, config = await serve_dynamo.DynamoWorker.from_args(argv)
        started = config, await made.start(5), await made.kv_event_sources()
        await made.cleanup()
        return started

    config, registered, sources = asyncio.run(start())
    assert config == ("ours", "/fake", "a") and sources == [("tcp://127.0.0.1:5557", "kv")]
    assert (registered.model, registered.served_model_name, registered.model_aliases) == ("/fake", "a", ["b"])
    assert vars(registered.llm)["context_length"] <= CONTEXT and registered.llm.max_num_seqs == 5


def test_what_has_no_meaning_is_refused(serve_dynamo, monkeypatch):
    monkeypatch.setenv("JAXSPEC_GROUP_KEY", 16 * "k")
    for argv, why in (
        (["--dp-size", "2"], "--dp-size has no meaning here: a worker is one process"),
        (["--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "a:1"], "a worker is one process"),
        (["--port", "8000"], "--port has no meaning here: Dynamo's frontend does this"),
        (["--api-key", "secret"], "--api-key has no meaning here: Dynamo's frontend does this, if anything does"),
        (["--chat-template", "chatml"], "--chat-template has no meaning here"),
        (["--no-tokenizer-info"], "--no-tokenizer-info has no meaning here"),
    ):
        with pytest.raises(SystemExit, match=why):
            asyncio.run(serve_dynamo.DynamoWorker.from_args(argv))
    assert serve_dynamo.NOT_HERE.keys() <= OPTIONS.keys()


def test_the_model_s_sampling_values_and_the_time_limit_hold(serve_dynamo, loaded, engine):
    """A request's own values win."""
    worker = serve_dynamo.DynamoWorker(loaded, parse_arguments(["--request-timeout", "9"]), ExitStack())
    for sampling, top_k in (({}, 7), ({"top_k": 3}, 3)):
        ask(worker, sampling_options=sampling, stop_conditions={"max_tokens": 1})
        assert (engine.params[-1].top_k, engine.timeouts[-1]) == (top_k, 9.0)
    asyncio.run(worker.cleanup())


def test_tokens_come_as_they_are_made_and_the_last_ones_with_the_reason(worker, engine):
    engine.cached_tokens = 1
    found = ask(worker, stop_conditions={"max_tokens": 5}, output_options={"logprobs": 2})
    assert [token for each in found for token in each["token_ids"]] == list(TEXT.encode()[:5]) and len(found) > 1
    assert [each.get("finish_reason") for each in found] == [*[None] * (len(found) - 1), "length"]
    usage = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1}}
    assert found[-1]["completion_usage"] == usage
    for each in found:
        assert len(each["log_probs"]) == len(each["top_logprobs"]) == len(each["token_ids"])
    assert [(top["rank"], top["token_id"]) for top in found[0]["top_logprobs"][0]] == [(1, 65), (2, 66)]


def test_options_have_our_names(serve_dynamo):
    request = {
        "token_ids": [1, 2, 3],
        "sampling_options": {
            "temperature": 0.5,
            "top_k": 7,
            "seed": None,
            "best_of": 3,
            "guided_decoding": {"json": {}, "regex": None},
        },
        "stop_conditions": {"max_tokens": None, "stop": ["x"], "stop_token_ids": [9], "stop_token_ids_hidden": [2, 9]},
        "output_options": None,
    }
    expected = SamplingParams(temperature=0.5, top_k=7, json_schema={}, max_tokens=61, stop_token_ids=[2, 9])
    assert asdict(serve_dynamo.params_of(request, 64)) == asdict(expected)


def test_completions_have_their_places(worker):
    found = ask(worker, sampling_options={"n": 2}, stop_conditions={"max_tokens": 3})
    ends = [each["index"] for each in found if "finish_reason" in each]
    assert sorted(ends) == [0, 1] and worker._running == {}


def test_a_wrong_request_is_the_clients_fault(worker):
    for wrong in ({"sampling_options": {"top_p": 2.0}}, {"token_ids": [999]}):
        with pytest.raises(InvalidArgument):
            ask(worker, **wrong)


def test_a_request_may_be_cancelled_before_the_engine_has_it(worker, engine):
    """Its grammar compiles."""
    context, compiled = SimpleNamespace(id=lambda: "a"), Future[None]()
    worker._thread.compile = lambda _: compiled
    engine.allow(1)

    async def cancel() -> list[dict]:
        answer = worker.generate({"token_ids": [1], "stop_conditions": {"max_tokens": 40}}, context)
        first = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0.01)
        await worker.abort(context)
        compiled.set_result(None)
        found = [await first]
        engine.allow(2)
        return found + [each async for each in answer]

    assert asyncio.run(cancel())[-1]["finish_reason"] == "cancelled" and engine.aborted == ["a-0"]


def test_a_cancelled_request_ends(worker, engine):
    context = SimpleNamespace(id=lambda: "a")
    engine.allow(1)

    async def cancel() -> list[dict]:
        answer = worker.generate({"token_ids": [1], "stop_conditions": {"max_tokens": 40}}, context)
        found = [await anext(answer)]
        await worker.abort(context)
        engine.allow(2)
        return found + [each async for each in answer]

    found = asyncio.run(cancel())
    assert found[-1]["finish_reason"] == "cancelled" and engine.aborted == ["a-0"]
