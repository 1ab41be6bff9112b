"""Measures a running server as its clients see it: latencies, throughput, goodput and accept length. It can be any server with
OpenAI's /v1/completions or SGLang's /generate: ours, SGLang, vLLM.

Requests are sent with a fixed concurrency (--max-concurrency), or at random times with a given rate (--request-rate), whether or
not the server keeps up. Options are named as in `vllm bench serve` and `sglang.bench_serving`. Use those, or guidellm, for more
load patterns and data sets.

  TTFT                  time to first token: from sending the request to the first chunk
  TPOT                  time per output token of a request after its first token
  inter-token latency   the gap before a chunk, divided by its tokens (with speculation a chunk has all tokens of a cycle)
  gap between chunks    what a reader of the stream notices
  goodput               requests per second that meet all limits of --goodput

The server counts the tokens (`usage`); without its counts, figures per token are unknown and never guessed. The first request is a
probe, more warm up; neither is measured. The exit status is 1 if requests failed, and 2 if nothing could be measured.

Examples:
    jaxspec bench serving --num-prompts 32 --max-concurrency 4
    jaxspec bench serving --request-rate 4 --goodput ttft:200 tpot:50
    jaxspec bench serving --prompts mt-bench --max-tokens 2048 --max-concurrency 1
"""

import argparse
import asyncio
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from jaxspec.commands.common import FORMATS, Chat, PromptSet, load_prompts
from jaxspec.commands.options import whole

from . import record
from .options import BenchmarkError, BenchmarkParser, exit_on_error
from .serving_figures import Run, notes_of, summarize
from .serving_figures import tables as tables

if TYPE_CHECKING:
    from .client import Answer, Client, Request  # needs aiohttp, which the tables do without

OBJECTIVES = ("ttft", "tpot", "e2el")
"""Limits of --goodput, with vLLM's names."""
KEY_VARIABLE = "JAXSPEC_API_KEY"
BUILT_IN_PROMPTS, PROBE, PROBE_TOKENS = 64, "def main():", 16
WATCH_SECONDS = 0.02
COUNTER = re.compile(r'^vllm:spec_decode_num_(\w+?)_total(?:\{(?:.*position="(\d+)")?.*\})? (\S+)', re.MULTILINE)
DESCRIBING = ("version", "tree", "speculative_algorithm", "context_length", "max_running_requests", "dtype")
"""Fields of /server_info that are recorded. It has more, such as keys and paths, that must not be."""


# The load


def arrival_times(count: int, request_rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each of `count` requests is due: a Poisson process that begins at 0.

    As in `vllm bench serve`, times are scaled to the exact mean rate; otherwise a short run would measure the luck of its draw.

    In: 3, 4.0, 0  Out: [0.0, 0.12, 0.5]
    """
    if math.isinf(request_rate) or count < 2:
        return [0.0] * count
    times = np.cumsum(np.random.default_rng(seed).exponential(size=count - 1))
    return [0.0, *(times * ((count - 1) / request_rate / times[-1])).tolist()]


async def send(client: "Client", requests: "Sequence[Request]", times: Sequence[float], concurrency: int | None, what: str) -> Run:
    """Sends every request when it is due, at most `concurrency` at once, and waits for all answers."""
    run, slots = Run(), asyncio.Semaphore(concurrency or len(requests))
    started = perf_counter()

    async def one(request: "Request", due: float) -> "list[Answer]":
        await asyncio.sleep(started + due - perf_counter())
        woken = perf_counter()
        run.worst_lateness = max(run.worst_lateness, woken - started - due)
        async with slots:
            run.worst_wait = max(run.worst_wait, perf_counter() - woken)
            answers = await ask(client, request)
        bar.update()
        return answers

    async def watch() -> None:
        while True:
            before = perf_counter()
            await asyncio.sleep(WATCH_SECONDS)
            run.worst_pause = max(run.worst_pause, perf_counter() - before - WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    with tqdm(total=len(requests), desc=what, unit=" requests", disable=None) as bar:
        answers = await asyncio.gather(*(one(request, due) for request, due in zip(requests, times, strict=True)))
    run.answers = [answer for each in answers for answer in each]
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return run


async def ask(client: "Client", request: "Request") -> "list[Answer]":
    """The answer to a request, and to each question that follows it. A failure is the last."""
    answers = [await client.complete(request)]
    while request.questions and answers[-1].failure is None:
        request = request.next_turn(answers[-1].text)
        answers.append(await client.complete(request))
    return answers


# The server


async def first_model(client: "Client") -> str:
    """The first model that the server lists. Raises BenchmarkError."""
    from .client import FailedRequest

    try:
        return str((await client.get_json("/v1/models"))["data"][0]["id"])
    except FailedRequest as error:
        raise BenchmarkError(f"{client.base_url}/v1/models: {error}") from None
    except (KeyError, IndexError, TypeError):
        raise BenchmarkError(f"{client.base_url}/v1/models lists no model: give --model, or check --base-url") from None


async def probe(client: "Client", request: "Request") -> None:
    """Sends a short request, and drops stream_options that the server rejects. Raises BenchmarkError if there is no answer."""
    from .client import USAGE

    while (failure := (await client.complete(request)).failure) is not None:
        if failure.status not in (400, 422) or client.backend != "openai" or client.usage + 1 == len(USAGE):
            raise BenchmarkError(f"{client.base_url}: {failure}")
        client.usage += 1


async def page(client: "Client", path: str) -> dict[str, Any]:
    """A page of JSON; empty if the server has none."""
    from .client import FailedRequest

    try:
        found = await client.get_json(path)
    except FailedRequest:
        return {}
    return found if isinstance(found, dict) else {}


async def counters(client: "Client") -> dict[str, float]:
    """vLLM's counters of drafts, summed over engines; those per position are "0", "1", ... Empty if the server has none."""
    from .client import FailedRequest

    try:
        return parse_counters(await client.get("/metrics"))
    except (FailedRequest, ValueError):
        return {}


def parse_counters(text: str) -> dict[str, float]:
    """
    In:  'vllm:spec_decode_num_drafts_total{engine="0"} 3'
    Out: {"drafts": 3.0}
    """
    sums: dict[str, float] = {}
    for name, position, value in COUNTER.findall(text):
        sums[position or name] = sums.get(position or name, 0.0) + float(value)
    return sums


def accept_length_between(before: dict[str, float], after: dict[str, float]) -> dict[str, Any] | None:
    """The acceptance between two readings of the counters; None if nothing was drafted or the server was restarted."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, accepted = grown.get("drafts", 0.0), grown.get("accepted_tokens", 0.0)
    if drafts <= 0 or accepted < 0:
        return None
    positions = sorted((name for name in grown if name.isdigit()), key=int)
    return {
        "accept_length": 1 + accepted / drafts,
        "acceptance_rate_per_position": [grown[position] / drafts for position in positions],
        "drafts": int(drafts),
        "source": "/metrics, vllm:spec_decode_* counters over this run",
    }


async def acceptance(client: "Client", before: dict[str, float]) -> dict[str, Any] | None:
    """The accept length of the run, with its source; None if the server does not say."""
    if after := await counters(client):
        return accept_length_between(before, after)
    states = (await page(client, "/server_info")).get("internal_states") or [{}]
    length = states[0].get("avg_spec_accept_length") if isinstance(states, list) and isinstance(states[0], dict) else None
    source = "/server_info, since the server's start or its last flush, not this run alone"
    return {"accept_length": float(length), "source": source} if isinstance(length, int | float) else None


# The command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("serving", __doc__, here=True)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", type=url, default="http://127.0.0.1:30000", metavar="URL", help="default: %(default)s; a key is read from "
        f"the variable {KEY_VARIABLE}",
    )  # fmt: skip
    group.add_argument(
        "--backend",
        choices=("openai", "sglang"),
        default="openai",
        help="OpenAI's endpoints (the default) or /generate (sglang), which takes no conversations",
    )
    group.add_argument("--model", metavar="NAME", help="name in the API (default: the first in /v1/models)")
    group.add_argument(
        "--request-timeout", type=positive, default=600.0, metavar="S", help="seconds per request (default: %(default)g)"
    )
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts", "--dataset-path", type=Path, metavar="FILE", help=f"{FORMATS} (default: held-out Python code)",
    )  # fmt: skip
    group.add_argument("--num-prompts", type=whole(1), metavar="N", help="default: the whole file; 64 built-in prompts")
    group.add_argument(
        "--max-tokens", "--output-len", type=whole(1), default=128, metavar="N", help="per prompt (default: %(default)s)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="generate all tokens, even after an end token")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)g")
    group = parser.add_argument_group("load")
    group.add_argument("--max-concurrency", type=whole(1), metavar="N", help="the most requests in flight (default: no limit)")
    group.add_argument(
        "--request-rate",
        type=positive,
        default=math.inf,
        metavar="R",
        help="requests per second, Poisson (default: inf, all at once)",
    )
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of the arrival times (default: %(default)s)")
    group.add_argument(
        "--num-warmups", type=whole(0), default=1, metavar="N", help="requests before the measurement (default: %(default)s)"
    )
    group.add_argument(
        "--goodput", type=objective, nargs="+", default=[], metavar="NAME:MS", help="count the requests per second that meet all "
        "of these limits in milliseconds: ttft, tpot, e2el; as in ttft:200 tpot:50",
    )  # fmt: skip
    return parser.parse(arguments)


def url(text: str) -> str:
    """An option's type: a server's address, without /v1. A wrong one is not repeated, because it may contain a password."""
    address = text.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_right = False
    if not is_right or "@" in parts.netloc or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError("must be like http://127.0.0.1:30000, without user, password or query")
    return address


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:  # nan is not
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text[:80]!r}")
    return value


def objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        raise argparse.ArgumentTypeError(f"must be NAME:MILLISECONDS with {', '.join(OBJECTIVES)}; got {text[:80]!r}")
    return name, positive(limit)


async def measure(options: argparse.Namespace, prompts: PromptSet) -> dict[str, Any]:
    """Probes the server, warms it up, and runs the load. Returns results for JSON."""
    from .client import Client, Request

    sampling = {"temperature": options.temperature, **({"ignore_eos": True} if options.ignore_eos else {})}
    async with Client(
        options.base_url, options.backend, options.model or "", api_key=os.environ.get(KEY_VARIABLE),
        timeout=options.request_timeout, **sampling,
    ) as client:  # fmt: skip
        client.model = options.model or await first_model(client)
        requests = [Request.of(prompt, options.max_tokens) for prompt in prompts.prompts]
        if options.backend == "sglang" and any(request.is_chat for request in requests):
            raise ValueError("/generate takes no conversations, and the prompts are some: leave out --backend sglang")
        first = Chat([{"role": "user", "content": PROBE}]) if requests[0].is_chat else PROBE
        await probe(client, Request.of(first, min(options.max_tokens, PROBE_TOKENS)))
        warm_ups = [requests[index % len(requests)] for index in range(options.num_warmups)]
        if warm_ups:
            await send(client, warm_ups, [0.0] * len(warm_ups), options.max_concurrency, "warming up")
        before = await counters(client)
        times = arrival_times(len(requests), options.request_rate, options.seed)
        run = await send(client, requests, times, options.max_concurrency, "requests")
        info = await page(client, "/server_info")
        results = {
            "served": {
                "model": PurePath(client.model).name if client.model.startswith("/") else client.model,
                "backend": options.backend,
                "server": {name: info[name] for name in DESCRIBING if isinstance(info.get(name), str | int)},
            },
            "load": {
                "num_prompts": len(requests),
                "max_tokens": options.max_tokens,
                "request_rate": None if math.isinf(options.request_rate) else options.request_rate,
                "max_concurrency": options.max_concurrency,
            },
            **summarize(run, dict(options.goodput)),
            "accept_length": await acceptance(client, before),
        }
    return results | {"notes": notes_of(results, run)}


def recordable(options: argparse.Namespace) -> argparse.Namespace:
    """The options as they are recorded: without the address of another machine, and without infinity, which JSON lacks."""
    values = dict(vars(options))
    if urlsplit(options.base_url).hostname not in ("127.0.0.1", "localhost", "::1"):
        values["command"] = re.sub(r"--base[-_]url[= ]\S+", "--base-url URL", options.command)
        values["base_url"] = None
    values["request_rate"] = str(options.request_rate)
    return argparse.Namespace(**values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if requests failed."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts, options.num_prompts, BUILT_IN_PROMPTS)
    results = asyncio.run(measure(options, prompts))
    print("".join(f"\n{text}\n" for text in tables(results).values()))
    for note in results["notes"]:
        print(f"note: {note}")
    record.write("serving", recordable(options), prompts, results)
    return 1 if results["summary"]["failed"] else 0


if __name__ == "__main__":
    exit_on_error("serving", main)
