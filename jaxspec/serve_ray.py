"""Ray Serve: servers as replicas behind Ray's proxy. `serve run jaxspec.serve_ray:application model-path=DIR` (docs/fleet.md).

A replica loads its model and compiles its programs before Ray calls it ready, and answers with the server's own application: all
endpoints, streams too. Ray is no dependency of ours: `pip install 'ray[serve]'`, 2.60 or newer.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from jaxspec.checks import Whole
from jaxspec.commands.config_file import arguments_of
from jaxspec.commands.serve_options import ServerArguments, make_parser, parse_arguments
from jaxspec.config import EngineConfig
from jaxspec.serve import load_all, log_settings, make_app
from jaxspec.server.app import Application
from jaxspec.server.logs import configure_logging

SOURCE = "jaxspec.serve_ray"
OURS = {"num_gpus": (1, 0), "min_replicas": (1, 0), "max_replicas": (1, 1)}
"""Arguments that are not the server's: their defaults, and the least that they may be. num_gpus counts for each of a replica's
tp_size devices."""
RAYS = {
    "host": "Ray's proxy listens",
    "port": "Ray's proxy listens",
    "shutdown_timeout": "graceful_shutdown_timeout_s is Ray's name of it",
    "config": "the options are arguments here",
    "dp_size": "Ray starts replicas",
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "a replica is one process"),
    "kv_events_config": "replicas of one machine would all take its port",
}
"""Options of the server that have no meaning here, and why."""
QUEUE = 2
"""Requests that a replica takes for each that it can run: when one ends, the next is there. Ray keeps the others for whichever
replica is free."""


@serve.deployment(health_check_period_s=5, health_check_timeout_s=10)
@serve.ingress()
class Replica:
    """One server. Ray's options of deployments (`deployments:` in its config file) may change all that `application` chooses."""

    def __init__(self, argv: list[str]):
        """`argv`: the server's command line. Raises the ValueError or ProgramError of a failed start; Ray then tries again."""
        arguments = parsed(argv)
        configure_logging(arguments.log_level)
        log_settings(arguments)
        self._closing = contextlib.ExitStack()
        self._app = make_app(load_all(arguments, self._closing), arguments)
        self._closing.callback(self._app.running.engine.close)

    def __serve_build_asgi_app__(self) -> Application:
        return self._app

    def check_health(self) -> None:
        """Ray replaces a replica whose check raises three times, or whose process is gone."""
        if not self._app.running.engine.is_healthy:
            raise RuntimeError("the engine has failed and takes no more requests")


def application(options: Mapping[str, Any]) -> serve.Application:
    """What `serve run` and `import_path` of a config file start.

    Args:
        options: those of `jaxspec serve`, and those of OURS: with more than `min_replicas`, Ray starts further replicas, up to
            `max_replicas`, when requests wait.

    Raises:
        ValueError: an option is unknown, or its value is wrong.
    """
    given = {str(name).replace("-", "_"): value for name, value in options.items()}
    numbers = {name: whole_number(name, given.pop(name, default), least) for name, (default, least) in OURS.items()}
    least, most = numbers["min_replicas"], numbers["max_replicas"]
    if most < least:
        raise ValueError(f"{SOURCE}: max_replicas ({most}) must be at least min_replicas ({least})")
    argv = command_line(given)
    engine = parsed(argv).engine
    running = engine.get("max_running_requests", EngineConfig.max_running_requests)
    many: dict[str, Any] = {"num_replicas": most}
    if least < most:
        many = {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": running}}
    resources = {
        "ray_actor_options": {"num_gpus": numbers["num_gpus"] * engine.get("tp_size", EngineConfig.tp_size)},
        "max_ongoing_requests": QUEUE * running,
    }
    deployment: Any = Replica  # a class to type checkers that have no Ray
    return deployment.options(**resources, **many).bind(argv)


def command_line(options: Mapping[str, Any]) -> list[str]:
    """The options as the server's arguments. Raises ValueError for one that is Ray's, or that no server has.

    In:  {"model_path": "org/model", "page_size": 8, "speculative_adaptive": True}
    Out: ["--model-path=org/model", "--page-size=8", "--speculative-adaptive"]
    """
    parser = make_parser()
    for name in options:
        action = parser.by_name.get(f"--{name.replace('_', '-')}")
        if action is not None and action.dest in RAYS:
            raise ValueError(f"{SOURCE}: {name} has no meaning here: {RAYS[action.dest]}")
    texts = {name: str(value) if isinstance(value, bool | int | float) else value for name, value in options.items()}
    return arguments_of(texts, parser, SOURCE)


def parsed(argv: Sequence[str]) -> ServerArguments:
    """The server's command line, checked. Raises ValueError where the server's start would end the process."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_arguments(argv, prog=SOURCE)
    except SystemExit:
        raise ValueError(said.getvalue().strip()) from None


def whole_number(name: str, value: Any, least: int) -> int:
    """An argument of OURS, which `serve run` passes as text."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    return Whole(least).clean(f"{SOURCE}: {name}", number)
