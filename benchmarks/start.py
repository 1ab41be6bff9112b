"""Measures a server's start: the time until it is ready and has answered a first completion, its memory, and the
longest pause of a request.

The server is a separate process with default flags, or with those after `--`. It starts with a full program cache and, with --cold,
with an empty one. A long completion is streamed while smaller programs compile in the background; then the server idles, and its
memory is read.

Examples:
    jaxspec bench start
    jaxspec bench start --cold --rounds 1 -- --max-running-requests 32 --speculative-adaptive
"""

import argparse
import itertools
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

from prometheus_client import ProcessCollector
from tqdm import tqdm

from jaxspec.commands.options import whole
from jaxspec.defaults import BUILT_IN_NAME
from jaxspec.server_process import terminate_process

from . import record
from .options import BenchmarkError, BenchmarkParser, exit_on_error
from .record import Spread

START_SECONDS, COMPILING_SECONDS, ANSWER_SECONDS = 900, 1800, 300
"""The longest until it is ready, until all programs are there, and for an answer."""
IDLE_SECONDS, LOOK_SECONDS = 3.0, 0.02
CACHES = ("JAXSPEC_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")
"""Either variable sets the folder of compiled programs; the second wins."""
TOKENS = 200
"""Of each completion that is streamed while programs compile."""
COLUMNS = {
    "ready": "ready, s (min..max)",
    "completion": "first completion, s",
    "cpu": "CPU s until then",
    "compiled": "all programs, s",
    "pause": "longest pause, s",
    "megabytes": "memory, MB",
}
"""What is measured of a start. Times in seconds since the launch; CPU time depends less on what else the machine does."""


def start(flags: Sequence[str], model: str, cache: str | None) -> dict[str, float]:
    """Starts a server and ends it. Returns what COLUMNS names.

    `cache`: the folder of compiled programs; None: the usual one.
    Raises BenchmarkError if the server does not start or answer.
    """
    launch = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - launch

    with serving(flags, dict.fromkeys(CACHES, cache) if cache else None) as (url, process):
        found = {"ready": now()}
        events(url, model, 1)
        found |= {"completion": now(), "cpu": used(process, "cpu_seconds"), "pause": 0.0}
        while missing_programs(url) and now() < COMPILING_SECONDS:
            gaps = [after - before for before, after in itertools.pairwise(events(url, model, TOKENS))]
            found["pause"] = max(found["pause"], *gaps, 0.0)
        found["compiled"] = now()
        time.sleep(IDLE_SECONDS)
        return found | {"megabytes": used(process, "resident_memory_bytes") / 1e6}


def events(url: str, model: str, tokens: int) -> list[float]:
    """Streams a completion, and returns when its events came."""
    body = {"model": model, "prompt": "def main():", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return [time.perf_counter() for line in answer if line.startswith(b"data:")]
    except OSError as error:
        raise BenchmarkError(f"the server gave no answer: {error}") from None


def missing_programs(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            programs = json.load(answer)["programs"]
            return programs["total"] - programs["ready"]
    except (OSError, ValueError, KeyError) as error:
        raise BenchmarkError(f"the server does not say how many programs are compiled: {error}") from None


def used(process: int, what: str) -> float:
    """What a process and its threads use (Linux): "cpu_seconds" so far, or "resident_memory_bytes"."""
    found = {each.name: each.samples[0].value for each in ProcessCollector(pid=lambda: process, registry=None).collect()}
    return found.get(f"process_{what}", float("nan"))


@contextmanager
def serving(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """Runs `jaxspec serve` with these flags and additional environment variables, and yields its URL and process id.

    Raises BenchmarkError with the end of the log if the server does not start.
    """
    command = [sys.executable, "-m", "jaxspec.serve", "--port=0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
        try:
            yield wait_for_url(process, log), process.pid
        finally:
            terminate_process(process)


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
    """Medians per kind of start."""
    rows = [
        [kind, *(str(Spread([each[name] for each in starts])) for name in COLUMNS)] for kind, starts in results.items() if starts
    ]
    return {"starts": record.table(["start", *COLUMNS.values()], rows)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("start", __doc__)
    parser.add_argument("--rounds", type=whole(1), default=3, metavar="N", help="starts (default: 3), after one that is not timed")
    parser.add_argument("--cold", action="store_true", help="also start without compiled programs; takes minutes")
    parser.add_argument("--model", default=BUILT_IN_NAME, help="its name in the API, if it is not the built-in one")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    results: dict[str, list[dict[str, float]]] = {"everything cached": [], "nothing cached": []}
    for number in tqdm(range(options.rounds + 1), desc="cached", unit="start"):
        measured = start(options.flags, options.model, None)
        if number:  # the first one fills the cache, if it is not full
            results["everything cached"].append(measured)
    for _ in tqdm(range(options.rounds if options.cold else 0), desc="cold", unit="start"):
        with tempfile.TemporaryDirectory() as empty:
            results["nothing cached"].append(start(options.flags, options.model, empty))
    print("\n" + tables(results)["starts"] + "\n")
    record.write("start", options, None, results)
    return 0


if __name__ == "__main__":
    exit_on_error("start", main)
