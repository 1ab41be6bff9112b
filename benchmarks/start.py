"""How long a server takes from its launch to the first token, with everything compiled before and, with --cold, with nothing.

The server is a process of its own with default flags, or those behind --. Ready is when its log says so; then it is asked for
one token.

Examples:
    python -m benchmarks.start
    python -m benchmarks.start --cold --rounds 1 -- --max-running-requests 32 --speculative-adaptive
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks import record
from benchmarks.engines import BenchmarkError, Spread, exit_on_error
from benchmarks.options import BenchmarkParser
from benchmarks.own_server import serving
from benchmarks.serving.answers import Request
from benchmarks.serving.backends import BACKENDS, Generation, UsageFields
from jaxspec.commands.options import whole
from jaxspec.defaults import BUILT_IN_NAME

PROMPT = "def main():"
CACHES = ("JAXSPEC_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")
"""Either says where compiled programs are kept; the second wins."""


def start(flags: Sequence[str], model: str, cache: str | None) -> tuple[float, float]:
    """Seconds from the launch until the server is ready, and until it has made a token.

    `cache`: where compiled programs are kept, if not where they are always kept.
    """
    started = time.perf_counter()
    with serving(flags, dict.fromkeys(CACHES, cache) if cache else None) as url:
        ready = time.perf_counter() - started
        asyncio.run(one_token(url, model))
        return ready, time.perf_counter() - started


async def one_token(url: str, model: str) -> None:
    """Raises BenchmarkError if there is none."""
    from benchmarks.serving.client import Client  # needs aiohttp, which the table does without

    generation = Generation(model, temperature=0.0, ignore_eos=True, stream=False, extra_body={})
    async with Client(url, BACKENDS["openai"], generation, UsageFields.NONE) as client:
        answer = await client.complete(Request(PROMPT, 1))
    if answer.failure:
        raise BenchmarkError(f"the server gave no answer: {answer.failure.reason}")


def tables(results: dict) -> dict[str, str]:
    """Seconds per kind of start."""
    rows = [[kind, *(str(Spread([each[index] for each in times])) for index in (0, 1))] for kind, times in results.items() if times]
    return {"seconds": record.table(["start", "ready, s (min..max)", "first token, s"], rows)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("start", __doc__)
    parser.add_argument("--rounds", type=whole(1), default=3, metavar="N", help="starts (default: 3), after one that is not timed")
    parser.add_argument("--cold", action="store_true", help="also start without compiled programs; takes minutes")
    parser.add_argument("--model", default=BUILT_IN_NAME, help="its name in the API, if it is not the built-in one")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    options = parse(arguments)
    results: dict[str, list[tuple[float, float]]] = {"everything cached": [], "nothing cached": []}
    for number in tqdm(range(options.rounds + 1), desc="cached", unit="start"):
        times = start(options.flags, options.model, None)
        if number:  # the first one fills the cache, if it is not full
            results["everything cached"].append(times)
    for _ in tqdm(range(options.rounds if options.cold else 0), desc="cold", unit="start"):
        with tempfile.TemporaryDirectory() as empty:
            results["nothing cached"].append(start(options.flags, options.model, empty))
    print("\n" + tables(results)["seconds"] + "\n")
    record.write("start", options, None, results)
    return 0


if __name__ == "__main__":
    exit_on_error(main)
