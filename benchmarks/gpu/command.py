"""The first hour on a GPU: does everything work, how close do kernels and whole cycles come to the memory bandwidth, and where does
the rest of the time go?

The model is a Llama 3.1 8B with an EAGLE-3 head, both with random weights, in bfloat16. Parts, the most important first:

PARTS
Each part is useful alone. Every result is written at once, so a run may be killed at any time. What fails, hangs or does not fit is
recorded with its reason, and the rest continues. A later run with the same --out adds its parts. Random weights accept no draft,
so tokens per second of trees are given at assumed accept lengths.

Examples:
    jaxspec bench gpu --only probe copy cycle
    jaxspec bench gpu --only choices check
    jaxspec bench gpu --size tiny --out tiny.jsonl      # on any machine: does the benchmark work?
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxspec.commands.options import Parser

from ..options import IN_CLONE, RESULTS, BenchmarkError
from . import tables
from .parts import GRACE, ORDER, OUT_OF_TIME, PARTS, RECORD, Part, Task

FOLDER = Path(__file__).parents[2] if __package__ == "benchmarks.gpu" else None
"""Where processes run: in a clone its root, so that they can import benchmarks."""
COMMAND = (sys.executable, "-c", f"from {__package__}.worker import main; main()")
BUDGET = 570.0
"""Seconds: where GPUs are lent, a command often has ten minutes."""
MOST_ENDS = 3
"""Processes of a part that may end early before the rest of it is left out."""
MEMORY_SHARE = "0.88"
"""JAX's share of the GPU's memory: no other process needs it meanwhile."""
SAME = ("devices", "jax", "jaxlib")
"""Fields of the environment that must be equal in all runs of a record."""


class Ended(Exception):
    """A process ended before its work was done. The message is the end of what it printed."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    about = "".join(f"  {part.name:<10} {part.about}\n" for part in PARTS)
    parser = Parser("jaxspec bench gpu", (__doc__ or "").replace("PARTS\n", about + "\n"))
    about = "tiny: for any device, with one setting of XLA; means nothing"
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help=about)
    parser.add_argument("--only", choices=ORDER, nargs="+", default=list(ORDER), metavar="PART", help="parts to run")
    parser.add_argument("--budget", type=float, help=f"seconds for all of it (default: {BUDGET:g}; tiny: an hour)")
    parser.add_argument("--out", type=Path, help=f"the file of results (default: {RECORD}; required for --size tiny)")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="compiled programs and autotuning (default: FILE.cache beside --out)"
    )
    options = parser.parse_args(arguments)
    if options.size == "tiny" and options.out is None:
        parser.error("--size tiny needs --out: its figures are not kept with the other results")
    options.budget = options.budget or (3600.0 if options.size == "tiny" else BUDGET)
    options.out = options.out or RESULTS / RECORD
    if IN_CLONE and options.size == "tiny" and options.out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error("--size tiny does not write to benchmarks/results: its figures mean nothing")
    options.cache = (options.cache or options.out.with_suffix(".cache")).resolve()
    return options


def read(out: Path, size: str, environment: dict[str, Any]) -> tables.Results:
    """The results that are there. Raises BenchmarkError if they are something else, or of another device or version."""
    try:
        results = tables.by_part(json.loads(line) for line in (out.read_text().splitlines() if out.exists() else ()))
        if any(found["size"] != size for found in results.values()):
            raise ValueError(f"not of size {size}")
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{out} was not written by this benchmark with --size {size}: choose another --out") from error
    for before in (found["environment"] for found in results.values()):
        for name in SAME:
            if before.get(name) != environment.get(name):
                different = f"{name} {before.get(name)}, and here it is {environment.get(name)}"
                raise BenchmarkError(f"{out} holds results of {different}: choose another --out")
    return results


def process(task: Task, command: Sequence[str] = COMMAND) -> Iterator[dict[str, Any]]:
    """Runs a task in a process of its own, and yields its messages. Raises Ended if it ends before its work is done.

    It has a process group of its own, which is killed with it: a server that it started must not outlive it.
    """
    environment = dict(os.environ)
    if "XLA_CLIENT_MEM_FRACTION" not in environment:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [*command, json.dumps(task._asdict())], cwd=FOLDER, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, start_new_session=True,
        ) as worker,
    ):  # fmt: skip
        assert worker.stdout
        try:
            yield from (json.loads(line) for line in worker.stdout if line.endswith("\n"))  # the last one may be torn
            with suppress(subprocess.TimeoutExpired):
                worker.wait(GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        if worker.wait():
            raise Ended(f"the process ended with status {worker.returncode}: {end_of(errors)}")


def end_of(errors: Any) -> str:
    """The end of a process's output, in one line. If the watchdog has ended it: where its main thread was, which comes last."""
    errors.seek(0)
    said = errors.read()[-20000:]
    if (hung := said.rfind("Timeout (")) >= 0:
        said = said[hung:].splitlines()[0] + " " + said[said.rfind("(most recent call first):") :][:500]
    return " ".join(said.split())[-600:] or "it said nothing"


Start = Callable[[Task], Iterator[dict[str, Any]]]
Keep = Callable[[dict[str, Any]], None]


def run_parts(
    parts: Sequence[Part], task: Task, keep: Keep, start: Start = process, clock: Callable[[], float] = time.time
) -> None:
    """Runs these parts until the task's deadline, and keeps what they say. Each leaves later ones their turns."""
    turns = sum(part.turn for part in parts)
    scale = min(1.0, (task.deadline - clock()) / turns) if turns else 1.0
    for place, part in enumerate(parts):
        began, later = clock(), scale * sum(each.turn for each in parts[place + 1 :])
        keep({"part": part.name, "begins": datetime.now(UTC).isoformat(timespec="seconds")})
        if began > task.deadline:
            keep({"part": part.name, "case": {}, "skipped": OUT_OF_TIME})
        else:
            task = run_part(part, task._replace(part=part.name, first=0, until=task.deadline - later), keep, start, clock)
        keep({"part": part.name, "seconds": clock() - began})


def run_part(part: Part, task: Task, keep: Keep, start: Start, clock: Callable[[], float]) -> Task:
    """Starts processes until all cases of a part have been started. Returns the task with the peaks, if this part measured them."""
    for _ in range(MOST_ENDS):
        first, current = task.first, None
        try:
            for message in start(task):
                current = message.get("starts")
                if current is not None:
                    print(f"{part.name}: {' '.join(map(str, current.values()))}", file=sys.stderr)
                    continue
                keep({"part": part.name, **message})
                task = task._replace(first=task.first + 1)
                if part.name == "copy" and "row" in message:
                    bandwidth, arithmetic = (message["row"][f"{what}_per_second"] for what in ("bytes", "operations"))
                    task = task._replace(bandwidth=bandwidth, arithmetic=arithmetic)
            return task
        except Ended as ended:
            if current is not None or task.first == first:  # else a case has failed, which is kept, and broken the device
                how = {"skipped": OUT_OF_TIME} if clock() > task.deadline else {"failed": str(ended)}
                keep({"part": part.name, "case": current or {}, **how})
            if current is None and task.first == first:  # it could not even begin: another one would not either
                return task
            task = task._replace(first=task.first + (current is not None))
    keep({"part": part.name, "case": {}, "skipped": f"{MOST_ENDS} processes ended early: the rest is left out"})
    return task


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if anything failed; skipped cases do not count. Raises BenchmarkError without a GPU."""
    options = parse(arguments)
    started = time.time()
    task = Task(None, options.size, deadline=started + options.budget - GRACE, cache=str(options.cache))
    try:
        (environment,) = process(task)
    except Ended as ended:
        raise BenchmarkError(f"JAX reported no devices: {ended}") from ended
    if environment["platform"] != "gpu" and options.size != "tiny":
        found = ", ".join(environment["devices"])
        raise BenchmarkError(f"JAX finds no GPU, only {found}: this benchmark needs one; --size tiny --out FILE works anywhere")
    read(options.out, options.size, environment)
    print(tables.head(environment, options.size) + "\n", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("ab", buffering=0) as file:
        said: list[dict] = []

        def keep(line: dict[str, Any]) -> None:
            line |= {"environment": environment, "size": options.size} if "begins" in line else {}
            said.append(line)
            file.write(json.dumps(line).encode() + b"\n")  # in one step, so that a killed run leaves whole lines
            if "seconds" in line:
                print(tables.show(line["part"], tables.by_part(said)[line["part"]]), flush=True)

        run_parts([part for part in PARTS if part.name in options.only], task, keep)
    print(tables.summary(read(options.out, options.size, environment), environment, options.size))
    print(f"{time.time() - started:.0f} s; written to {options.out}")
    failures = sum("failed" in line for line in said)
    if failures:
        print(f"{failures} failed: see above", file=sys.stderr)
    return 1 if failures else 0
