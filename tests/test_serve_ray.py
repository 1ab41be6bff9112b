"""The Ray Serve application, with a stand-in for what it uses of Ray: what is asked of Ray, and what a replica does."""

import asyncio
import importlib
import sys
import types
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import httpx
import pytest

from jaxspec.commands.serve_options import ServerArguments
from jaxspec.engine.driver import EngineThread
from jaxspec.server.app import Application, create_app
from jaxspec.server.model import ServedModel
from tests.server.fakes import CONTEXT, TREE, FakeEngine, byte_tokenizer


class Deployment:
    """What `serve.deployment` makes of a class: options and arguments are kept."""

    def __init__(self, made_of, **options):
        self.made_of, self.chosen, self.bound = made_of, options, ()

    def options(self, **options) -> "Deployment":
        return Deployment(self.made_of, **self.chosen, **options)

    def bind(self, *arguments) -> "Deployment":
        self.bound = arguments
        return self


def ingress(app=None):
    """Ray's own asks a class without an application for it, after its constructor."""

    def wrap(made_of):
        assert app is not None or callable(made_of.__serve_build_asgi_app__)
        return made_of

    return wrap


@pytest.fixture
def serve_ray(monkeypatch) -> Iterator[ModuleType]:
    """jaxspec.serve_ray, with the stand-in."""
    ray = types.ModuleType("ray")
    ray.serve = SimpleNamespace(  # type: ignore[attr-defined]
        deployment=lambda **options: lambda made_of: Deployment(made_of, **options), ingress=ingress, Application=Deployment
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delitem(sys.modules, "jaxspec.serve_ray", raising=False)
    yield importlib.import_module("jaxspec.serve_ray")
    sys.modules.pop("jaxspec.serve_ray", None)


def test_the_options_are_the_servers_own_and_resources_are_rays(serve_ray):
    made = serve_ray.application({"model-path": "org/model", "page_size": 8, "speculative_adaptive": True, "num_gpus": "4"})
    assert made.bound == (["--model-path=org/model", "--page-size=8", "--speculative-adaptive"],)
    assert made.chosen["ray_actor_options"] == {"num_gpus": 4} and made.chosen["num_replicas"] == 1
    assert made.chosen["max_ongoing_requests"] == 16 and "autoscaling_config" not in made.chosen


def test_more_replicas_start_when_requests_wait(serve_ray):
    made = serve_ray.application({"max-replicas": 3, "max_running_requests": "5", "num_gpus": 0})
    assert made.chosen["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 5}
    assert made.chosen["max_ongoing_requests"] == 10 and "num_replicas" not in made.chosen
    assert made.chosen["ray_actor_options"] == {"num_gpus": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 8000}, "port has no meaning here: Ray's proxy listens"),
        ({"dp-size": 2}, "dp_size has no meaning here: Ray starts replicas"),
        ({"dp": 2}, "dp has no meaning here: Ray starts replicas"),
        ({"node-rank": 1}, "node_rank has no meaning here: a replica is one process"),
        ({"dist_init_addr": "a:1"}, "dist_init_addr has no meaning here: a replica is one process"),
        ({"page-size": "many"}, r"error: argument --page-size/--block-size: .*many"),
        ({"tp-size": 0}, "error: --tp-size must be"),
        ({"modell": "x"}, "modell is not an option"),
        ({"num_gpus": "many"}, "num_gpus must be a whole number >= 0"),
        ({"min_replicas": 3}, r"max_replicas \(1\) must be at least min_replicas \(3\)"),
    ],
)
def test_wrong_options_are_refused_by_name(serve_ray, options, message):
    with pytest.raises(ValueError, match=f"jaxspec.serve_ray: {message}"):
        serve_ray.application(options)


def test_a_replica_whose_options_are_wrong_says_so(serve_ray):
    with pytest.raises(ValueError, match="there is no option --modell"):
        serve_ray.Replica.made_of(["--modell=x"])


def test_a_replica_is_made_when_all_is_compiled_and_answers_as_the_server_does(serve_ray, monkeypatch):
    order: list[str] = []
    engine = EngineThread(FakeEngine())

    def make_app(loaded: object, arguments: ServerArguments) -> Application:
        order.append(f"{loaded}, {arguments.model}")
        return create_app(engine, ServedModel("fake", CONTEXT, TREE, byte_tokenizer()))

    monkeypatch.setattr(serve_ray, "load_all", lambda *_: "compiled")
    monkeypatch.setattr(serve_ray, "make_app", make_app)
    monkeypatch.setattr(serve_ray, "configure_logging", lambda _: None)
    replica = serve_ray.Replica.made_of(["--model-path=org/model"])
    assert order == ["compiled, org/model"]
    replica.check_health()

    async def ask() -> list[httpx.Response]:
        app = httpx.ASGITransport(replica.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=app, base_url="http://ray") as client:
            body = {"prompt": "a", "max_tokens": 3}
            return [await client.post("/v1/completions", json=body | {"stream": stream}) for stream in (False, True)]

    async def start() -> list[str]:
        """Ray says so before the first request (ASGI's lifespan)."""
        news, said = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}], []

        async def receive() -> dict:
            return news.pop()

        async def send(message: dict) -> None:
            said.append(message["type"])

        await replica.__serve_build_asgi_app__()({"type": "lifespan", "state": {}}, receive, send)
        return said

    assert asyncio.run(start()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    whole, stream = asyncio.run(ask())
    assert whole.status_code == stream.status_code == 200 and whole.json()["choices"][0]["text"]
    assert stream.headers["content-type"].startswith("text/event-stream") and stream.text.endswith("data: [DONE]\n\n")
    replica._closing.close()
    with pytest.raises(RuntimeError, match="the engine has failed"):
        replica.check_health()
