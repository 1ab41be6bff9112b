"""Measures how long a server takes from its launch until it is ready and until its first token, with a full program cache and, with
--cold, with an empty one.

The server is a separate process with default flags, or with those after `--`. It is ready when its log says so.

Examples:
    jaxspec bench start
    jaxspec bench start --cold --rounds 1 -- --max-running-requests 32 --speculative-adaptive
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from jaxspec.commands.options import whole
from jaxspec.defaults import BUILT_IN_NAME

from . import record
from .options import BenchmarkError, BenchmarkParser, exit_on_error
from .record import Spread

START_SECONDS = 900
LOOK_SECONDS = 0.02
PROMPT = "def main():"
CACHES = ("JAXSPEC_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")
"""Either variable sets the folder of compiled programs; the second wins."""


def start(flags: Sequence[str], model: str, cache: str | None) -> tuple[float, float]:
    """Seconds from the launch until the server is ready, and until it has answered with a token.

    `cache`: the folder of compiled programs; None: the usual one.
    """
    started = time.perf_counter()
    with serving(flags, dict.fromkeys(CACHES, cache) if cache else None) as url:
        ready = time.perf_counter() - started
        one_token(url, model)
        return ready, time.perf_counter() - started


def one_token(url: str, model: str) -> None:
    """Raises BenchmarkError if the server does not answer with a completion."""
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            json.load(response)["choices"][0]["text"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"the server gave no completion: {error}") from None


@contextmanager
def serving(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs `jaxspec serve` with these flags and additional environment variables, and yields its URL.

    Raises BenchmarkError with the end of the log if the server does not start.
    """
    command = [sys.executable, "-m", "jaxspec.serve", "--port=0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
        try:
            yield wait_for_url(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_url(process: subprocess.Popen, log: TextIO) -> str:
    """Reads the server's log until it says where it listens."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(LOOK_SECONDS)
        log.seek(0)
        if found := re.search(r"ready at (http://[\d.]+:\d+)", log.read()):
            return found[1]
    log.seek(0)
    raise BenchmarkError(f"the server was not ready: {log.read()[-1000:]}")


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
    exit_on_error("start", main)
