"""A load generator for any server with OpenAI's or SGLang's API: ours, SGLang, vLLM. Sends prompts at given times and
measures what a client sees. Options have the names of `sglang.bench_serving` and `vllm bench serve`.

  time to first token      from sending the request to the first chunk with a token
  time per output token    of one request: from its first to its last token, by the tokens after the first
  inter-token latency      per token: with speculation a chunk has all the tokens of a cycle, which share the gap before it
  gap between chunks       what somebody who watches the text sees: it comes in so many steps, several tokens each
  goodput                  requests per second that meet all the limits of --goodput

Tokens are counted by the server (`usage`, in every chunk if it can); where it does not count them, figures per token are
unknown, never guessed. The accept length is told with its source. A first request tries everything out, further ones warm up;
neither is counted. The exit status is 0, 1 if requests failed, 2 if the options, the server or its answer are wrong.

Examples:
    python -m benchmarks.serving --num-prompts 32 --max-concurrency 4
    python -m benchmarks.serving --request-rate 4 --goodput ttft:200 tpot:50
    python -m benchmarks.serving --base-url http://127.0.0.1:8000 --backend openai-chat --dataset-path mt_bench.jsonl
    python -m benchmarks.serving --backend sglang --dataset-name random --random-input-len 256 --ignore-eos
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import options as command_line
from .markdown import tables as tables

if TYPE_CHECKING:
    from .client import Client
    from .datasets import Workload
    from .load import Run

LATE_MS = 50.0
PAUSE_MS = 100.0
"""From here on this client's own slowness is told."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    return command_line.parse(arguments, __doc__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if requests failed, 130 if it was interrupted. Raises BenchmarkError or ValueError for what is wrong before."""
    options = parse(arguments)

    from .. import record  # after the options, since this takes a while to import
    from .privacy import recordable

    try:
        workload, results = asyncio.run(measure(options))
    except KeyboardInterrupt:
        print("interrupted: nothing is recorded", file=sys.stderr)
        return 130
    print("".join(f"\n{text}\n" for text in tables(results).values()))
    for note in results["notes"]:
        print(f"note: {note}")
    record.write("serving", recordable(options, address(options)), workload.prompts, results)
    return 1 if results["summary"]["failed"] else 0


def address(options: argparse.Namespace) -> str:
    """Of the server."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return options.base_url or f"http://{host}:{options.port}"


async def measure(options: argparse.Namespace) -> "tuple[Workload, dict[str, Any]]":
    """Probes, warms up, runs the load. Returns what was sent and what came out."""
    from . import metrics, probe, server_stats
    from .arrivals import arrival_times
    from .backends import BACKENDS, Generation
    from .client import Client
    from .datasets import load

    url = address(options)
    generation = Generation(
        options.model or "", options.temperature, options.ignore_eos, not options.disable_stream, options.extra_body
    )
    async with Client(
        url, BACKENDS[options.backend], generation, endpoint=options.endpoint, headers=command_line.headers(options),
        timeout=options.request_timeout, verify=not options.insecure,
    ) as client:  # fmt: skip
        model = options.model or await probe.first_model(client, url)
        client.generation = generation._replace(model=model)
        workload = load(wanted(options), model)
        await probe.probe(client, workload.extra[0], url)
        limit = options.max_concurrency
        if options.num_warmups:
            await send(client, workload.extra[1:], [0.0] * options.num_warmups, limit, "warming up", options.disable_tqdm)
        before = await server_stats.drafting(client)
        times = arrival_times(len(workload.requests), options.request_rate, options.burstiness, options.seed)
        run = await send(client, workload.requests, times, limit, "requests", options.disable_tqdm)
        results = {
            "served": {
                "model": server_stats.without_directory(model),
                "backend": options.backend,
                "server": await server_stats.describe(client),
            },
            "load": described(options, workload, client),
            **metrics.summarize(run, options.metric_percentiles, options.goodput),
            "accept_length": await server_stats.acceptance(client, before),
        }
    results["notes"] = [*unknowns(results), *doubts(results)]
    return workload, results | ({"requests": metrics.details(run)} if options.output_details else {})


def wanted(options: argparse.Namespace) -> Any:
    """What the options say about the prompts; one request more than the warm-ups is for the probe."""
    from .datasets import Wanted

    return Wanted(
        options.dataset_name, options.dataset_path, options.num_prompts, 1 + options.num_warmups, options.output_len,
        options.random_input_len, options.random_range_ratio, options.sharegpt_context_len, options.seed,
        not options.disable_shuffle, options.tokenizer, options.backend == "openai-chat",
    )  # fmt: skip


async def send(client: "Client", requests: Sequence, times: Sequence[float], limit: int | None, what: str, quiet: bool) -> "Run":
    """Runs a load under a progress bar that also counts the failures."""
    from tqdm import tqdm

    from .load import run

    failed = 0
    with tqdm(total=len(requests), desc=what, unit=" requests", disable=True if quiet else None) as bar:

        def count(answer: Any) -> None:
            nonlocal failed
            failed += answer.failure is not None
            bar.update()
            if failed:
                bar.set_postfix_str(f"{failed} failed")

        return await run(client, requests, times, limit, count)


def described(options: argparse.Namespace, workload: "Workload", client: "Client") -> dict[str, Any]:
    """The load, for the results."""
    return {
        "dataset": workload.source,
        "num_prompts": len(workload.requests),
        "asked_output_tokens": sum(request.output_len for request in workload.requests),
        "request_rate": None if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "stream": client.generation.stream,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "usage_fields": client.usage.value if client.backend.has_stream_options else None,
    }


def unknowns(results: dict[str, Any]) -> list[str]:
    """What could not be measured, and why."""
    if not results["load"]["stream"]:
        return ["without a stream there is no time to first token, and none per token"]
    if results["summary"]["output_tokens"] is None:
        return ["the server counts no tokens (usage): figures per token and tokens per second are unknown"]
    if results["summary"]["completed"] and results["tokens_per_chunk"] is None:
        return ["the server counts tokens only at the end: how many a chunk has, and so the time between tokens, is unknown"]
    return []


def doubts(results: dict[str, Any]) -> list[str]:
    """What makes the figures less than they seem."""
    client, found = results["client"], []
    if results["load"]["request_rate"] is not None:
        if client["worst_lateness_ms"] > LATE_MS:
            late = client["worst_lateness_ms"]
            found.append(f"this client fell behind its schedule by up to {late:.0f} ms: the load was less than it was to be")
        if client["worst_wait_for_a_slot_ms"] > LATE_MS:
            wait = client["worst_wait_for_a_slot_ms"] / 1000
            found.append(f"requests waited up to {wait:.1f} s because of --max-concurrency, which no latency counts")
    if client["worst_pause_ms"] > PAUSE_MS:
        pause = client["worst_pause_ms"]
        found.append(f"this client stood still for up to {pause:.0f} ms: single times may be too long by that much")
    return found
