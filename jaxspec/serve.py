"""jaxspec serve: an HTTP server for one model. Endpoints are OpenAI's, Anthropic's and SGLang's, flags SGLang's and vLLM's."""

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from ipaddress import ip_address
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.cli import exit_on_signals, interruptible
from jaxspec.commands.common import in_flags
from jaxspec.commands.replicas import serve_replicas
from jaxspec.commands.serve_options import PROG, ServerArguments, parse_arguments, settings_in_use
from jaxspec.config import EngineConfig
from jaxspec.defaults import BUILT_IN_NAME, check_name
from jaxspec.engine.host_group import ALONE, HostGroup, Leader
from jaxspec.engine.hosts import STOP_SIGNAL, run_to_the_end, status_of
from jaxspec.engine.pages import PageObserver
from jaxspec.server.kv_events import Publisher
from jaxspec.server.logs import DecodeLog, configure_logging
from jaxspec.server.settings import ServerSettings
from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.tool_formats import TOOL_FORMATS, ToolFormat, format_name_in

if TYPE_CHECKING:
    from jaxspec.load import LoadedModels
    from jaxspec.server.app import Application
    from jaxspec.text.chat_template import ChatTemplate

logger = logging.getLogger("jaxspec")

_JSON = "-H 'Content-Type: application/json' -d"
CHAT_EXAMPLE = f"""/v1/chat/completions {_JSON} '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""
EXAMPLE = f"""/v1/completions {_JSON} '{{"prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}}'"""
EXAMPLE_WITHOUT_TOKENIZER = f"""/generate {_JSON} '{{"input_ids": [1, 2, 3], "sampling_params": {{"max_new_tokens": 16}}}}'"""


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Serves until SIGTERM or SIGINT. The exit status is 0 then, 1 if it can't listen or a program fails at the start, 2 if the
    settings or files are wrong, and 13 if another process of its group has ended."""
    arguments = parse_arguments(argv, prog=prog)
    configure_logging(arguments.log_level)
    exit_on_signals()
    log_settings(arguments)
    try:
        check_name(arguments.model)  # at once: what follows loads JAX
    except ValueError as error:
        return _refuse(arguments, str(error), 2)
    if arguments.hosts.nnodes > 1:
        run_to_the_end(arguments.hosts, partial(take_part, arguments))
    if arguments.dp_size > 1:
        try:
            with listen(arguments.host, arguments.port) as found:  # where the router will listen when all servers are ready
                warn_if_open(arguments, found)
        except OSError as error:
            return _refuse_address(arguments, error)
        try:
            return serve_replicas(arguments, list(sys.argv[1:] if argv is None else argv))
        except (ValueError, OSError) as error:
            return _refuse(arguments, str(error), 2)
    return load_and_serve(arguments, ALONE)


def take_part(arguments: ServerArguments) -> int:
    """Does the work of one process of several, and returns its exit status."""
    from jaxspec.engine.following import follow, join  # loads JAX

    assert arguments.group_key is not None
    exit_on_signals(STOP_SIGNAL)
    try:
        group = join(arguments.hosts, arguments.group_key)
    except (ValueError, OSError, AuthenticationError) as error:
        return _refuse(arguments, f"can't join the group at {arguments.hosts.dist_init_addr}: {error or type(error).__name__}", 1)
    if isinstance(group, Leader):
        try:
            status = load_and_serve(arguments, group)
        except SystemExit as ended:  # by a signal
            status = status_of(ended)
        if status == 0:
            group.close()
        return status
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, group.stop)
    from jaxspec.commands.serve_loading import read

    try:
        models = read(arguments)
    except (ValueError, OSError) as error:
        return _refuse(arguments, in_flags(str(error)), 2)
    follow(group, lambda pages: replace(models, config=replace(models.config, num_pages=pages)).engine.runner)
    return 0


def load_and_serve(arguments: ServerArguments, group: HostGroup) -> int:
    """Does the work of the process that answers HTTP, and returns its exit status."""
    status = 0
    try:  # before loading, so that an unavailable address fails at once
        listener = listen(arguments.host, arguments.port)
    except OSError as error:
        return _refuse_address(arguments, error)
    from jaxspec.engine.programs import ProgramError  # loads JAX

    with listener, contextlib.ExitStack() as stack:
        warn_if_open(arguments, listener)
        try:
            loaded = load_all(arguments, stack, group)
        except (ValueError, OSError) as error:
            return _refuse(arguments, in_flags(str(error)), 2)
        except ProgramError as error:
            logger.debug("the start has failed", exc_info=error)
            return _refuse(arguments, str(error), 1)
        gc.collect()
        gc.freeze()  # what is loaded by now stays: a full collection of it would stop all threads for a second
        try:
            serve(loaded, arguments, listener)
        except SystemExit as ended:
            status = status_of(ended)
    if group is ALONE and loaded.models.engine.runner.programs.is_compiling:
        # XLA can't be interrupted, and Python must not end while a thread is in it
        logging.shutdown()
        os._exit(status)
    return status


def log_settings(arguments: ServerArguments) -> None:
    """Logs the options that are not at their defaults, have no effect, or were changed."""
    logger.info("settings: %s", ", ".join(f"{name}={value}" for name, value in arguments.given.items()) or "all at their defaults")
    for note in arguments.notes:
        logger.info("%s", note)
    for warning in arguments.warnings:
        logger.warning("%s", warning)


class Loaded(NamedTuple):
    """What a server serves."""

    models: "LoadedModels"
    chat_template: "ChatTemplate | None"
    sampling_defaults: Mapping[str, Any]
    """Of OpenAI's endpoints."""


def load_all(arguments: ServerArguments, stack: contextlib.ExitStack, group: HostGroup = ALONE) -> Loaded:
    """The model, which `group` runs, and what belongs to it, its programs compiled. The stack closes what must be closed. Raises
    ValueError, OSError or ProgramError."""
    from jaxspec.commands.serve_loading import compile_programs, load, load_chat_template, sampling_defaults

    observer = PageObserver()
    if arguments.kv_events.is_on:  # first, so that an unavailable address fails at once
        page_size = arguments.engine.get("page_size", EngineConfig.page_size)
        observer = stack.enter_context(contextlib.closing(Publisher(arguments.kv_events, page_size)))
    models = load(arguments, group)
    models.engine.prefix_cache.observer = observer
    chat_template = load_chat_template(arguments, models)
    stack.enter_context(chat_template or contextlib.nullcontext())
    defaults = sampling_defaults(models.directory, models.name) if arguments.model_sampling else {}
    importing = threading.Thread(target=import_module, args=["jaxspec.server.http_server"])  # XLA leaves room for it
    importing.start()
    try:
        compile_programs(models, arguments.compile_ahead, progress=arguments.shows_progress)
    finally:
        importing.join()
    return Loaded(models, chat_template, defaults)


def make_app(loaded: Loaded, arguments: ServerArguments) -> "Application":
    """The HTTP application and, in `app.running.engine`, the engine's thread, which the caller closes."""
    from jaxspec.engine.driver import EngineThread
    from jaxspec.server.app import create_app
    from jaxspec.server.metrics import RequestCollector, StepTimes
    from jaxspec.server.model import MAX_COMPLETIONS, ServedModel

    models = loaded.models
    name, *other_names = arguments.served_model_names or (models.name,)
    config, programs = models.engine.config, models.engine.runner.programs
    model = ServedModel(
        name,
        models.longest,
        models.engine.tree,
        models.tokenizer,
        loaded.chat_template,
        tool_format=tool_format(arguments, loaded.chat_template),
        reasoning=None if arguments.reasoning_parser is None else REASONING_FORMATS[arguments.reasoning_parser],
        trees=models.engine.trees.all,
        algorithm=models.algorithm,
        max_completions=min(MAX_COMPLETIONS, config.max_waiting_requests or MAX_COMPLETIONS),
        programs=lambda: programs.count,
        other_names=tuple(other_names),
        path=models.name,
        tokenizer_path=None if models.tokenizer is None else str(models.directory.resolve()),
        sampling_defaults=loaded.sampling_defaults,
        devices=config.tp_size,
        strict_name=arguments.settings.strict_model_name,
    )
    metrics, steps = RequestCollector(name), StepTimes()
    engine = EngineThread(models.engine, [DecodeLog(), metrics, steps], failed=models.group.failed)
    try:
        return create_app(engine, model, known_settings(arguments, models), metrics=metrics, steps=steps)
    except BaseException:
        engine.close()
        raise


def serve(loaded: Loaded, arguments: ServerArguments, listener: socket.socket) -> None:
    """Runs the HTTP server until a signal ends it; the engine's thread has ended when this returns or raises."""
    from jaxspec.engine.programs import lower_priority
    from jaxspec.server.http_server import HttpServer

    models, seed = loaded.models, loaded.models.engine.config.random_seed
    app = make_app(loaded, arguments)

    def ready() -> None:
        url, name = url_of(listener), (arguments.served_model_names or (models.name,))[0]
        if arguments.engine["random_seed"] is None:
            logger.info("random seed %d: start with --random-seed %d to repeat it", seed, seed)
        logger.info("%s is ready at %s", name, url)
        logger.info("try: curl %s%s", url, example(loaded))
        if models.tokenizer is None:
            logger.warning("the model has no tokenizer: prompts must be token ids, sent to /generate")
        lower_priority()  # of what still compiles

    try:
        server = HttpServer(app, app.running.engine, ready)
        if models.group is not ALONE:
            signal.signal(STOP_SIGNAL, server.handle_exit)
        server.run(sockets=[listener])
    finally:
        app.running.engine.close()


def example(loaded: Loaded) -> str:
    """A request that fits the model, to follow the server's URL. The built-in model has a template, but only completes code."""
    if loaded.models.tokenizer is None:
        return EXAMPLE_WITHOUT_TOKENIZER
    return EXAMPLE if loaded.chat_template is None or loaded.models.name == BUILT_IN_NAME else CHAT_EXAMPLE


def tool_format(arguments: ServerArguments, chat_template: "ChatTemplate | None") -> ToolFormat | None:
    """The given format of tool calls, or the one that the chat template tells; None: it is not known."""
    name = arguments.tool_call_parser
    if name is None and chat_template is not None and (name := format_name_in(chat_template.text)) is not None:
        logger.info("tool calls are read as %s, as the chat template tells (see --tool-call-parser)", name)
    return None if name is None else TOOL_FORMATS[name]


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it accepts connections once the server runs. If a name has several addresses, as
    localhost does, it is the IPv4 one. Raises OSError if the address is unavailable."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # such as 127.0.0..1
        raise OSError(errno.EINVAL, "not a valid host name") from None
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or another server could bind it until this one listens
    except OSError:
        listener.close()
        raise
    return listener


def warn_if_open(arguments: ServerArguments, listener: socket.socket) -> None:
    """Logs a warning if other machines can connect without a key."""
    if not ip_address(listener.getsockname()[0]).is_loopback and arguments.settings.api_key is None:
        logger.warning("ANYONE WHO REACHES %s CAN USE THIS SERVER: set JAXSPEC_API_KEY or --api-key", arguments.host)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def known_settings(arguments: ServerArguments, models: "LoadedModels") -> ServerSettings:
    """The settings, with the values that were chosen for options not given."""
    found = {"speculative_algorithm": models.algorithm, "dtype": str(models.target.dtype), **settings_in_use(models.engine.config)}
    return replace(arguments.settings, shown={**arguments.settings.shown, **found})


def _refuse(arguments: ServerArguments, message: str, status: int) -> int:
    print(f"{arguments.prog}: error: {message}", file=sys.stderr)
    return status


def _refuse_address(arguments: ServerArguments, error: OSError) -> int:
    place = f"{arguments.host}:{arguments.port}"
    return _refuse(arguments, f"can't listen on {place} ({error.strerror}): choose another --host or --port", 1)


if __name__ == "__main__":
    sys.exit(interruptible(partial(main, prog="python -m jaxspec.serve")))
