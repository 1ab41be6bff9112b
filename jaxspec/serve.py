"""python -m jaxspec.serve: an HTTP server for one model. Flags and endpoints are SGLang's and OpenAI's."""

import logging
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from jaxspec.server.arguments import ALGORITHMS, HEAD_FLAGS, ServerArguments, in_flags, parse_arguments
from jaxspec.server.logs import DecodeLog, configure_logging

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.server.chat_template import ChatTemplate

logger = logging.getLogger("jaxspec")

_JSON = "-H 'Content-Type: application/json' -d"
EXAMPLE = f"""/v1/completions {_JSON} '{{"prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}}'"""
EXAMPLE_WITHOUT_TOKENIZER = f"""/generate {_JSON} '{{"input_ids": [1, 2, 3], "sampling_params": {{"max_new_tokens": 16}}}}'"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. The exit status is 0 then, 1 if it can't listen, 2 if the settings or files are wrong."""
    arguments = parse_arguments(argv)
    configure_logging(arguments.log_level)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    logger.info("settings: %s", ", ".join(f"{name}={value}" for name, value in arguments.given.items()) or "all at their defaults")
    for warning in arguments.warnings:
        logger.warning("%s", warning)

    from jaxspec.server.http_server import is_loopback, listen

    try:  # before the long part: an address that can't be had shows at once
        listener = listen(arguments.host, arguments.port)
    except OSError as error:
        return _refuse(f"can't listen on {arguments.host}:{arguments.port} ({error.strerror}): choose another --host or --port", 1)
    from jaxspec.server.chat_template import ChatTemplate

    with listener:
        try:
            llm = load(arguments)
            chat_template = ChatTemplate.of_model(llm.tokenizer)
        except (ValueError, OSError) as error:
            return _refuse(in_flags(str(error)), 2)
        if not is_loopback(listener):
            logger.warning("other machines can reach this server, and it asks nobody for a key")
        serve(llm, chat_template, arguments.served_model_name or llm.model_name, listener)
    return 0


def load(arguments: ServerArguments) -> "LLM":
    """The model with every program compiled. Raises ValueError or OSError, saying what is wrong with the settings or files."""
    from jaxspec.llm import LLM  # loads JAX

    check_algorithm(arguments)
    progress = arguments.log_level in ("debug", "info")
    options = dict(token_map=arguments.token_map, dtype=arguments.dtype, progress=progress, **arguments.engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        llm = LLM(arguments.model, arguments.draft, arguments.spec, **options)
    for warning in caught:
        logger.warning("%s", in_flags(str(warning.message)))  # such as that lossy thresholds are set
    if llm.head is None and (useless := [name for name in HEAD_FLAGS if name in arguments.given]):
        flag = f"--{useless[0].replace('_', '-')}"
        raise ValueError(f"{flag} has no use without a draft head, and there is none: give --speculative-draft-model-path")
    engine, stats = llm.engine, llm.engine.stats()
    tree = f"{llm.head.config.algorithm} draft tree {engine.spec}" if llm.head else "plain decoding"
    logger.info("model %s, context length %d tokens, %s", llm.model_name, engine.context_length, tree)
    tokens = stats.total_pages * stats.page_size
    logger.info("cache %d pages of %d tokens, %d tokens in all", stats.total_pages, stats.page_size, tokens)
    if tokens < engine.context_length:
        logger.warning("the cache holds less than the context length: requests may have up to %d tokens", tokens)
    seconds = engine.warm_up(progress=progress)
    logger.info("every program is compiled (%.1f s)", seconds)
    return llm


def check_algorithm(arguments: ServerArguments) -> None:
    """Raises ValueError unless the head is what --speculative-algorithm says: elsewhere a wrong name costs all speed silently."""
    from jaxspec.checkpoints.loading import head_kind
    from jaxspec.llm import DEMO, find_own_head

    if arguments.algorithm in (None, "NONE"):
        return
    model = DEMO / "target" if arguments.model is None else Path(arguments.model)
    head = find_own_head(model) if arguments.draft is None else Path(arguments.draft)
    found = None if head is None else head_kind(head)
    if found not in ALGORITHMS[arguments.algorithm]:
        what = f"{head} holds an {found} head" if found else f"{head or model} holds no head: give --speculative-draft-model-path"
        raise ValueError(f"--speculative-algorithm {arguments.algorithm} was given, but {what}")


def serve(llm: "LLM", chat_template: "ChatTemplate | None", name: str, listener: socket.socket) -> None:
    """Runs the HTTP server until a signal ends it; the engine's thread has ended when this returns or raises."""
    from jaxspec.engine.async_engine import AsyncEngine
    from jaxspec.server.app import create_app
    from jaxspec.server.http_server import HttpServer
    from jaxspec.server.metrics import Metrics
    from jaxspec.server.model import MAX_COMPLETIONS, ServedModel

    config, stats = llm.engine.config, llm.engine.stats()
    model = ServedModel(
        name,
        min(llm.engine.context_length, stats.total_pages * stats.page_size),
        llm.engine.spec,
        llm.tokenizer,
        chat_template,
        adaptive=config.adaptive,
        max_completions=min(MAX_COMPLETIONS, config.max_waiting_requests or MAX_COMPLETIONS),
    )
    metrics = Metrics(name)
    engine = AsyncEngine(llm.engine, [DecodeLog(), metrics])

    def ready(url: str) -> None:
        logger.info("%s is ready at %s", name, url)
        logger.info("try: curl %s%s", url, EXAMPLE if llm.tokenizer else EXAMPLE_WITHOUT_TOKENIZER)
        if llm.tokenizer is None:
            logger.warning("the model has no tokenizer: prompts must be token ids, sent to /generate")

    try:
        HttpServer(create_app(engine, model, metrics=metrics), engine, ready).run(sockets=[listener])
    finally:
        engine.close()
        if chat_template is not None:
            chat_template.close()


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """A signal while the model loads; also what uvicorn lets through after it has shut down in order."""
    raise SystemExit(0)


def _refuse(message: str, status: int) -> int:
    print(f"python -m jaxspec.serve: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
