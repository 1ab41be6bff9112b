"""Measures a running server as its clients see it: latencies, throughput and the accept length. It can be any server with OpenAI's
API: ours, SGLang, vLLM. For request rates, goodput and more data sets use the clients that `jaxspec bench` lists.

Requests are sent as fast as --max-concurrency allows. A first one, to warm up, is not measured. Options are named as in
`vllm bench serve`.

  TTFT                  time to first token: from sending the request to the first chunk
  TPOT                  time per output token of a request after its first token; the server counts the tokens (`usage`)
  gap between chunks    what a reader of the stream notices (with speculation a chunk has all tokens of a cycle)

The exit status is 1 if requests failed.

Examples:
    jaxspec bench serving --num-prompts 32 --max-concurrency 4
    jaxspec bench serving --prompts mt-bench --max-tokens 2048 --max-concurrency 1
"""

import argparse
import asyncio
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from time import perf_counter
from typing import Any

import numpy as np
from tqdm.asyncio import tqdm

from jaxspec.commands.common import FORMATS, Chat, PromptSet, Turns, json_of, load_prompts
from jaxspec.commands.options import whole

from . import record
from .options import BenchmarkError, BenchmarkParser, exit_on_error

PERCENTILES = (50, 90, 99)
BUILT_IN_PROMPTS = 64
TIMEOUT_SECONDS = 600.0
KEY_VARIABLE = "JAXSPEC_API_KEY"
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass
class Answer:
    """The answer to one request, or why there is none."""

    sent: float
    """Seconds of time.perf_counter, as in `chunks`."""
    chunks: list[float] = field(default_factory=list)
    """When events with text came, reasoning included, which `text` has not."""
    text: str = ""
    tokens: int | None = None
    """None: the server does not say."""
    failure: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Adds an event of the stream. Raises BenchmarkError if it reports an error, KeyError or TypeError if it is none."""
        if event.get("error") is not None:
            raise BenchmarkError(f"the server reported an error: {str(event['error'])[:200]}")
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event["choices"]:
            if choice.get("finish_reason") in ("abort", "error", "timeout"):
                raise BenchmarkError(f"the server gave up the request: {choice['finish_reason']}")
            delta, text = choice.get("delta", {}), choice["delta"].get("content") if "delta" in choice else choice["text"]
            self.chunks += [perf_counter()] if text or delta.get("reasoning_content") or delta.get("reasoning") else []
            self.text += text or ""

    def seconds(self) -> dict[str, list[float]]:
        """Its times by name; no time per token if there is no second one, or their number is unknown."""
        first, whole, later = self.chunks[0] - self.sent, self.chunks[-1] - self.sent, (self.tokens or 0) - 1
        return {
            "time_to_first_token": [first],
            "time_per_output_token": [(whole - first) / later] if later > 0 else [],
            "gap_between_chunks": [after - before for before, after in pairwise(self.chunks)],
            "end_to_end_latency": [whole],
        }


async def ask(session: Any, options: argparse.Namespace, prompt: Any) -> Answer:
    """Streams one answer. A failure is kept in it, not raised."""
    import aiohttp

    chat = isinstance(prompt, Chat)
    body = {"messages": prompt.messages} if chat else {"prompt": prompt}
    body |= {"model": options.model, "max_tokens": options.max_tokens, "temperature": options.temperature, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if options.ignore_eos else {})
    answer, done = Answer(perf_counter()), False
    try:
        async with session.post(f"{options.base_url}/v1/{'chat/' * chat}completions", json=body) as response:
            if response.status != 200:
                raise BenchmarkError(f"status {response.status}: {(await response.text(errors='replace'))[:200]}")
            async for line in response.content:
                name, _, data = line.strip().partition(b":")
                done |= data.strip() == b"[DONE]"
                if name == b"data" and not done:
                    answer.take(json.loads(data))
        if not (done and answer.chunks):
            answer.failure = "the answer is empty" if done else "the stream ended before [DONE]"
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        answer.failure = f"malformed event ({type(error).__name__}: {str(error)[:80]})"
    except BenchmarkError as error:
        answer.failure = str(error)
    except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
        answer.failure = f"{type(error).__name__}: check --base-url"
    key = os.environ.get(KEY_VARIABLE)
    answer.failure = answer.failure.replace(key, "(secret)") if key else answer.failure  # some servers repeat it
    return answer


async def converse(session: Any, options: argparse.Namespace, prompt: Any, slots: asyncio.Semaphore) -> list[Answer]:
    """Waits until a slot is free; each question of several turns follows the answer to the one before."""
    first, *questions = prompt.questions if isinstance(prompt, Turns) else (prompt,)
    asked: Any = Chat([{"role": "user", "content": first}]) if isinstance(prompt, Turns) else first
    async with slots:
        answers = [await ask(session, options, asked)]
        for question in questions if not answers[0].failure else ():
            asked = asked.then(answers[-1].text, question)
            answers.append(await ask(session, options, asked))
    return answers


def accept_length(before: str, after: str) -> dict[str, Any] | None:
    """The accept length between two readings of vLLM's counters, summed over engines; None if the server has none, drafted nothing
    or was restarted.

    In:  pages with vllm:spec_decode_num_drafts_total and ..._accepted_tokens_total, which grow by 4 and 6
    Out: {"accept_length": 2.5, "drafts": 4, "source": ...}
    """
    grown: dict[str, float] = defaultdict(float)
    for text, sign in ((before, -1), (after, 1)):
        for name, value in COUNTER.findall(text):
            grown[name] += sign * float(value)
    drafts, accepted = grown["drafts"], grown["accepted_tokens"]
    if drafts <= 0 or accepted < 0:
        return None
    return {"accept_length": 1 + accepted / drafts, "drafts": int(drafts), "source": "/metrics, over this run"}


def summarize(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """Figures of a run, for JSON. None is unknown."""
    done = [answer for answer in answers if not answer.failure]
    tokens = None if any(answer.tokens is None for answer in done) else sum(answer.tokens or 0 for answer in done)
    times = [answer.seconds() for answer in done]
    return {
        "summary": {
            "completed": len(done),
            "failed": len(answers) - len(done),
            "duration_seconds": duration,
            "output_tokens": tokens,
            "requests_per_second": len(done) / duration,
            "output_tokens_per_second": None if tokens is None else tokens / duration,
        },
        "latency_ms": {name: distribution([value for each in times for value in each[name]]) for name in Answer(0, [0]).seconds()},
        "failed_requests": dict(Counter(answer.failure for answer in answers if answer.failure).most_common(10)),
    }


def distribution(seconds: Sequence[float]) -> dict[str, Any] | None:
    """Mean, median and percentiles in milliseconds; None if there are no values."""
    if not seconds:
        return None
    values = 1000 * np.asarray(seconds)
    percentiles = {str(each): float(value) for each, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return {"mean": float(values.mean()), "median": float(np.median(values)), "count": len(values), "percentiles": percentiles}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """`throughput` and `latency`."""
    summary, load, speculation = results["summary"], results["load"], results["accept_length"]
    limit = load["max_concurrency"] or "no limit"
    rows = [
        ["model", " ".join(filter(None, (results["served"]["model"], results["served"]["server"].get("tree"))))],
        ["load", f"at most {limit} at once, {load['num_prompts']} prompts"],
        ["completed, failed requests", f"{summary['completed']}, {summary['failed']}"],
        ["output tokens/s", figure(summary["output_tokens_per_second"])],
        ["requests/s", figure(summary["requests_per_second"])],
        ["accept length", figure(speculation and speculation["accept_length"])],
        *([f"failed: {reason.replace('|', '/')}", str(count)] for reason, count in results["failed_requests"].items()),
    ]
    latency = {name.replace("_", " "): each for name, each in results["latency_ms"].items() if each}
    times = [[name, *map(figure, (each["mean"], *each["percentiles"].values()))] for name, each in latency.items()]
    header = ["latency, ms", "mean", *(f"p{each}" for each in PERCENTILES)]
    return {"throughput": record.table(["throughput", ""], rows), "latency": record.table(header, times)}


def figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("serving", __doc__, here=True)
    add, key = parser.add_argument, f"default: %(default)s; a key is read from the variable {KEY_VARIABLE}"
    add("--base-url", type=url, default="http://127.0.0.1:30000", metavar="URL", help=key)
    add("--model", metavar="NAME", help="name in the API (default: the first in /v1/models)")
    add("--prompts", "--dataset-path", type=Path, metavar="FILE", help=f"{FORMATS} (default: held-out Python code)")
    add("--num-prompts", type=whole(1), metavar="N", help="default: the whole file; 64 built-in prompts")
    add("--max-tokens", "--output-len", type=whole(1), default=128, metavar="N", help="per prompt (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="generate all tokens, even after an end token")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)g")
    add("--max-concurrency", type=whole(1), metavar="N", help="the most requests in flight (default: no limit)")
    return parser.parse(arguments)


def url(text: str) -> str:
    """An option's type: a server's address, without /v1. A wrong one is not repeated, because it may contain a password."""
    address = text.rstrip("/").removesuffix("/v1")
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[\w./-]*)?", address):
        raise argparse.ArgumentTypeError("must be like http://127.0.0.1:30000, without user, password or query")
    return address


async def measure(options: argparse.Namespace, prompts: PromptSet) -> dict[str, Any]:
    """Warms the server up, and runs the load. Returns results for JSON. Raises BenchmarkError if the first request fails."""
    try:
        import aiohttp
    except ImportError:
        raise BenchmarkError("the HTTP client needs aiohttp: pip install 'jaxspec-llm[bench]'") from None
    key, slots = os.environ.get(KEY_VARIABLE), asyncio.Semaphore(options.max_concurrency or len(prompts.prompts))
    how: dict[str, Any] = {"headers": {"Authorization": f"Bearer {key}"} if key else {}, "read_bufsize": 2**24}
    how |= {"timeout": aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(**how) as session:

        async def page(path: str) -> str:
            """Empty if the server has none."""
            try:
                async with session.get(options.base_url + path) as response:
                    return await response.text(errors="replace") if response.status == 200 else ""
            except (aiohttp.ClientError, OSError) as error:
                raise BenchmarkError(f"{options.base_url}: {type(error).__name__}: check --base-url") from None

        models = json_of(await page("/v1/models")).get("data") or [{}]
        options.model = options.model or models[0].get("id", "")
        first, *_ = await converse(session, options, prompts.prompts[0], slots)
        if first.failure:
            raise BenchmarkError(f"{options.base_url}: {first.failure}: check --base-url, --model and {KEY_VARIABLE}")
        before, started = await page("/metrics"), perf_counter()
        asked = [converse(session, options, prompt, slots) for prompt in prompts.prompts]
        answers = [answer for each in await tqdm.gather(*asked, desc="requests", disable=None) for answer in each]
        duration, after = perf_counter() - started, await page("/metrics")
        info = json_of(await page("/server_info"))
    return {
        "served": {
            "model": PurePath(options.model).name,
            "server": {name: info[name] for name in ("version", "tree") if name in info},
        },
        "load": {"num_prompts": len(asked), "max_tokens": options.max_tokens, "max_concurrency": options.max_concurrency},
        **summarize(answers, duration),
        "accept_length": accept_length(before, after),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if requests failed."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts, options.num_prompts, BUILT_IN_PROMPTS)
    results = asyncio.run(measure(options, prompts))
    print("".join(f"\n{text}\n" for text in tables(results).values()))
    if not re.match(r"https?://(127\.0\.0\.1|localhost)\b", options.base_url):  # no address of another machine
        options.command, options.base_url = re.sub(r"--base[-_]url[= ]\S+", "--base-url URL", options.command), None
    record.write("serving", options, prompts, results)
    return 1 if results["summary"]["failed"] else 0


if __name__ == "__main__":
    exit_on_error("serving", main)
