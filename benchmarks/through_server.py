"""What HTTP costs: tokens per second through the server against LLM.generate, the same prompts at the same batch size.

    python -m benchmarks.through_server

The server is a process of its own; it, this client and the model share the machine's cores. Each wave sends as many requests as the
batch has rows and waits for all of them; waves of the server and of LLM.generate take turns. Both must give the same text.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.engines import BenchmarkError, Spread, alternate, exit_on_error
from benchmarks.options import BenchmarkParser
from benchmarks.own_server import serving
from benchmarks.serving.answers import Request
from benchmarks.serving.backends import BACKENDS, Generation, UsageFields
from jaxspec import LLM, SamplingParams
from jaxspec.commands.common import load_prompts
from jaxspec.commands.options import tree, whole
from jaxspec.llm import Prompt

WAYS = ("generate", "whole", "stream")


@dataclass(frozen=True)
class Wave:
    """One batch of requests, answered."""

    seconds: float
    tokens: int
    texts: list[str]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def server_flags(options: argparse.Namespace) -> list[str]:
    """Of a server with this benchmark's tree and largest batch, and nothing that could make the two sides differ."""
    spec = options.tree
    return [
        f"--speculative-num-steps={spec.num_steps}", f"--speculative-eagle-topk={spec.topk}",
        f"--speculative-num-draft-tokens={spec.num_draft_tokens}", f"--max-running-requests={max(options.batch)}",
        "--disable-radix-cache", "--speculative-request-trees=none",
    ]  # fmt: skip


def texts_of(prompts: Sequence[Prompt]) -> list[str]:
    """Raises ValueError for prompts of token ids."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ValueError("the server and LLM.generate are to give the same texts: the prompts must be text")
    return texts


def measure(llm: LLM, url: str, prompts: Sequence[str], options: argparse.Namespace) -> list[dict]:
    results = []
    for batch in options.batch:
        waves: dict[str, list[Wave]] = {way: [] for way in WAYS}
        for number, way in alternate(WAYS, options.rounds + 1):
            wave = run_wave(way, llm, url, [prompts[index % len(prompts)] for index in range(batch)], options.max_tokens)
            if number:  # the first round warms up
                waves[way].append(wave)
        texts = {way: waves[way][0].texts for way in WAYS}
        if not texts["generate"] == texts["whole"] == texts["stream"]:
            raise BenchmarkError("the server and LLM.generate gave different texts")
        speeds = {way: [wave.tokens_per_second for wave in waves[way]] for way in WAYS}
        shares = {way: Spread(record.shares(speeds[way], speeds["generate"])).describe() for way in WAYS[1:]}
        results.append({
            "batch": batch, "tokens_per_second": {way: Spread(speeds[way]).describe() for way in WAYS}, "share": shares,
        })  # fmt: skip
    return results


def run_wave(way: str, llm: LLM, url: str, prompts: Sequence[str], max_tokens: int) -> Wave:
    """One batch, one of the WAYS."""
    started = time.perf_counter()
    if way == "generate":
        outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        answers = [(output.text, len(output.token_ids)) for output in outputs]
    else:
        answers = asyncio.run(ask_all(url, prompts, max_tokens, stream=way == "stream"))
    seconds = time.perf_counter() - started
    return Wave(seconds, sum(tokens for _, tokens in answers), [text for text, _ in answers])


async def ask_all(url: str, prompts: Sequence[str], max_tokens: int, *, stream: bool) -> list[tuple[str, int]]:
    """Texts and numbers of tokens of all prompts, sent at once. Raises BenchmarkError if one has no answer."""
    from benchmarks.serving.client import Client  # needs aiohttp, which the table does without

    generation = Generation("jaxspec-demo", temperature=0.0, ignore_eos=True, stream=stream, extra_body={})
    async with Client(url, BACKENDS["openai"], generation, UsageFields.AT_END) as client:
        answers = await asyncio.gather(*(client.complete(Request(prompt, max_tokens)) for prompt in prompts))
    for answer in answers:
        if answer.failure or answer.tokens is None:
            raise BenchmarkError(f"the server gave no answer: {answer.failure.reason if answer.failure else 'no usage'}")
    return [(answer.text, answer.tokens or 0) for answer in answers]


def tables(results: Sequence[dict]) -> dict[str, str]:
    """Markdown, from the results alone."""
    rows = []
    for result in results:
        speed, share = result["tokens_per_second"], result["share"]
        rows.append([
            str(result["batch"]), *(f"{speed[way]['median']:.0f}" for way in WAYS),
            *(str(Spread(share[way]["values"])) for way in WAYS[1:]),
        ])  # fmt: skip
    header = ["requests at once", "LLM.generate, tokens/s", "server", "server, streaming", "share of LLM.generate", "streaming"]
    return {"through the server": record.table(header, rows)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("through-server", __doc__)
    parser.add_argument("--prompts", type=Path, help="a file: one prompt per line, or .jsonl (default: built-in held-out code)")
    parser.add_argument("--num-prompts", type=whole(1), default=32, help="prompts to use (default: %(default)s)")
    parser.add_argument("--max-tokens", type=whole(1), default=128, help="tokens to generate per prompt (default: %(default)s)")
    parser.add_argument("--tree", type=tree, default=tree("3/1/4"), metavar="S/K/N", help="the draft tree (default: 3/1/4)")
    parser.add_argument(
        "--batch-size",
        "--batch",
        dest="batch",
        type=whole(1),
        nargs="+",
        default=[1, 8, 32],
        help="requests at once (default: 1 8 32)",
    )
    parser.add_argument("--rounds", type=whole(1), default=5, help="timed rounds (default: %(default)s)")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts, options.num_prompts)
    llm = LLM(spec=options.tree, max_running_requests=max(options.batch), prefix_cache=False)
    llm.engine.warm_up(progress=True)
    with serving(server_flags(options)) as url:
        results = measure(llm, url, texts_of(prompts.prompts), options)
    print("".join(f"\n{text}\n" for text in tables(results).values()))
    record.write("through_server", options, prompts, results)
    return 0


if __name__ == "__main__":
    exit_on_error(main)
