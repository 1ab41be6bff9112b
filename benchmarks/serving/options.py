"""The command line: SGLang's and vLLM's names where they have one."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxspec.commands.options import whole

from ..options import BenchmarkParser

KEY_VARIABLE = "JAXSPEC_API_KEY"
BACKENDS = ("openai", "openai-chat", "sglang")
ALIASES = {"vllm": "openai", "vllm-chat": "openai-chat", "sglang-oai": "openai", "sglang-oai-chat": "openai-chat"}
"""The other tools' names for them."""
DATASETS = ("built-in", "sharegpt", "random", "mt-bench", "custom")
OBJECTIVES = ("ttft", "tpot", "e2el")
"""What --goodput can set a limit to, by vLLM's names."""


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Options; ends the process if they are wrong."""
    parser = BenchmarkParser("serving", description, here=True)
    add_server_options(parser)
    add_prompt_options(parser)
    add_load_options(parser)
    add_figure_options(parser)
    options = parser.parse(arguments)
    if options.dataset_name is None:
        options.dataset_name = "built-in" if options.dataset_path is None else "custom"
    if options.dataset_path is not None and options.dataset_name in ("built-in", "random"):
        parser.error(f"--dataset-name {options.dataset_name} reads no file: leave out --dataset-path, or name another dataset")
    if options.dataset_path is None and options.dataset_name not in ("built-in", "random"):
        parser.error(f"--dataset-name {options.dataset_name} is a file of yours: give --dataset-path")
    if options.disable_stream and {"ttft", "tpot"} & set(options.goodput):
        parser.error("--goodput ttft and tpot need streams: leave out --disable-stream")
    return options


def add_server_options(parser: BenchmarkParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", type=url, metavar="URL", help="http://HOST:PORT (default: of --host and --port)")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=whole(1), default=30000, help="default: %(default)s")
    group.add_argument(
        "--backend", type=backend, default="openai", metavar="NAME", help="the protocol: openai (/v1/completions, the default), "
        "openai-chat (/v1/chat/completions) or sglang (/generate)",
    )  # fmt: skip
    group.add_argument("--endpoint", metavar="PATH", help="another path than the protocol's own")
    group.add_argument("--model", metavar="NAME", help="name in the API (default: the first that /v1/models lists)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"better in the variable {KEY_VARIABLE}, which other users can't read; never recorded"
    )
    group.add_argument(
        "--header", type=header, nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="sent too; never recorded"
    )
    group.add_argument("--insecure", action="store_true", help="trust any certificate")
    group.add_argument(
        "--request-timeout", type=positive, default=600.0, metavar="S", help="seconds per request (default: %(default)g)"
    )


def add_prompt_options(parser: BenchmarkParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name", choices=DATASETS, metavar="NAME", help="built-in (held-out Python code, the default); sharegpt (its JSON "
        "file); mt-bench or custom (.jsonl with turns, prompt or token_ids, or a text with one prompt per line; of turns the first "
        "counts); random (tokens; drafts of them are rarely accepted)",
    )  # fmt: skip
    group.add_argument("--dataset-path", "--prompts", type=Path, metavar="FILE", help="of sharegpt, mt-bench and custom")
    group.add_argument(
        "--num-prompts", type=whole(1), metavar="N", help="requests to send (default: 64 built-in ones, 1000 random ones, or the "
        "file's, at most 1000)",
    )  # fmt: skip
    group.add_argument("--disable-shuffle", action="store_true", help="take the file's prompts in their order")
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of prompts and arrivals (default: %(default)s)")
    group.add_argument(
        "--output-len", "--random-output-len", "--sharegpt-output-len", "--custom-output-len", "--max-tokens", type=whole(1),
        metavar="N", help="tokens to ask for per request (default: 128; sharegpt: as many as its answer has)",
    )  # fmt: skip
    group.add_argument(
        "--random-input-len", "--input-len", type=whole(1), default=1024, metavar="N", help="tokens of a random prompt "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--random-range-ratio", type=ratio, default=0.0, metavar="R", help="random lengths lie between (1 - R) and (1 + R) times "
        "the given ones, as vLLM has it (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--sharegpt-context-len", type=whole(1), metavar="N", help="leave out conversations with more tokens (default: 2048)"
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a model directory with tokenizer.json, for random and sharegpt (default: "
        "the built-in model's, if it is served)",
    )  # fmt: skip


def add_load_options(parser: BenchmarkParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=rate, default=math.inf, metavar="R", help="requests per second, whether or not the server keeps up "
        "(default: inf, all at once)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="B", help="1: a Poisson process; less: in bursts; more: regular "
        "(default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=whole(1), metavar="N", help="most requests under way; others wait, which no latency counts"
    )
    group.add_argument(
        "--num-warmups", "--warmup-requests", type=whole(0), default=1, metavar="N", help="requests before the clock starts "
        "(default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("requests")
    group.add_argument("--temperature", type=nonnegative, default=0.0, metavar="T", help="default: %(default)g")
    group.add_argument("--ignore-eos", action="store_true", help="generate all the tokens, whatever the model says")
    group.add_argument("--disable-ignore-eos", dest="ignore_eos", action="store_false", help="the default here")
    group.add_argument("--disable-stream", action="store_true", help="answers in one piece: only their whole latency is known")
    group.add_argument(
        "--extra-body", "--extra-request-body", type=json_object, default={}, metavar="JSON", help="more fields of every request"
    )


def add_figure_options(parser: BenchmarkParser) -> None:
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--goodput", type=objective, nargs="+", default={}, action=Objectives, metavar="NAME:MS", help="count the requests per "
        "second that meet all of these, in milliseconds: ttft, tpot, e2el; as in ttft:200 tpot:50",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", type=percentiles, default=[50.0, 90.0, 99.0], metavar="P,P", help="default: 50,90,99"
    )
    group.add_argument("--output-details", "--save-detailed", action="store_true", help="record every request's figures too")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


class Objectives(argparse.Action):
    """Collects pairs into a dict."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, dict(values))


def url(text: str) -> str:
    """An option's type: a server's address. The API's /v1, which some people add, is taken off.

    The address may be shown and recorded, so it holds no password; a wrong one is not repeated.
    """
    shortened = text.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(shortened)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_right = False
    if not is_right:
        raise argparse.ArgumentTypeError("must be like http://127.0.0.1:30000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError("must have neither a user, a query nor a fragment: give keys with --api-key or --header")
    return shortened


def backend(text: str) -> str:
    name = ALIASES.get(text, text)
    if name not in BACKENDS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(BACKENDS)}; got {text[:80]!r}")
    return name


def header(text: str) -> tuple[str, str]:
    """The value is not repeated: it may be secret."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip() or any(not character.isprintable() for character in text):
        raise argparse.ArgumentTypeError("must be NAME=VALUE on one line")
    return name.strip(), value.strip()


def number(text: str, least: float, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:  # which nan does not
        raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, got {text[:80]!r}")
    return value


def nonnegative(text: str) -> float:
    return number(text, 0, 1e9)


def positive(text: str) -> float:
    return number(text, 1e-3, 1e9)


def ratio(text: str) -> float:
    return number(text, 0, 1)


def rate(text: str) -> float:
    return number(text, 1e-3)


def objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        raise argparse.ArgumentTypeError(f"must be NAME:MILLISECONDS with {', '.join(OBJECTIVES)}; got {text[:80]!r}")
    return name, nonnegative(limit)


def percentiles(text: str) -> list[float]:
    return [number(each, 0, 100) for each in text.split(",")]


def json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:80]!r}")
    return value


def headers(options: argparse.Namespace) -> dict[str, str]:
    """What is sent with every request: the key, and whatever else was given."""
    key = options.api_key or os.environ.get(KEY_VARIABLE)
    return ({"Authorization": f"Bearer {key}"} if key else {}) | dict(options.header)
