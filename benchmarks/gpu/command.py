"""The first hour on a GPU: does everything work, how close do kernels and whole cycles come to the memory bandwidth, and where does
the rest of the time go?

The model is a Llama 3.1 8B with an EAGLE-3 head, both with random weights, in bfloat16. Parts, the most important first:

PARTS
Each part is useful alone. Every result is written at once, so a run may be killed at any time. What fails, hangs or does not fit is
recorded with its reason, and the rest continues. A later run with the same --out adds its parts.

Examples:
    jaxspec bench gpu --only probe copy cycle
    jaxspec bench gpu --only choices check
    jaxspec bench gpu --size tiny --out tiny.jsonl      # on any machine: does the benchmark work?
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxspec.commands.options import Parser, whole

from ..options import IN_CLONE, RESULTS, BenchmarkError
from . import tables
from .parts import GRACE, ORDER, OUT_OF_TIME, PARTS, RECORD, Task

FOLDER = Path(__file__).parents[2] if __package__ == "benchmarks.gpu" else None
"""Where processes run: in a clone its root, so that they can import benchmarks."""
COMMAND = (sys.executable, "-c", f"from {__package__}.worker import main; main()")
BUDGET = 570.0
"""Seconds: where GPUs are lent, a command often has ten minutes."""
SAME = ("devices", "tp", "jax", "jaxlib")
"""Of the environment of all parts of a record; one device has no `tp`."""
MOST_ENDS = 3
"""Processes of a part that may end early before the rest of it is left out."""
MEMORY_SHARE = "0.88"
"""JAX's share of the GPU's memory: no other process needs it meanwhile."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    about = "".join(f"  {part.name:<10} {part.about}\n" for part in PARTS)
    parser = Parser("jaxspec bench gpu", (__doc__ or "").replace("PARTS\n", about + "\n"))
    about = "tiny: for any device; means nothing"
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help=about)
    about = "GPUs that share the models; kernels alone use one (default: 1)"
    parser.add_argument("--tp-size", "--tp", dest="tp", type=whole(1), default=1, metavar="N", help=about)
    parser.add_argument("--only", choices=ORDER, nargs="+", default=list(ORDER), metavar="PART", help="parts to run")
    parser.add_argument("--budget", type=float, help=f"seconds for all of it (default: {BUDGET:g}; tiny: an hour)")
    parser.add_argument("--out", type=Path, help=f"the file of results (default: {RECORD}; required for --size tiny)")
    about = "compiled programs and autotuning (default: FILE.cache beside --out)"
    parser.add_argument("--cache", type=Path, metavar="DIR", help=about)
    options = parser.parse_args(arguments)
    if options.size == "tiny" and options.out is None:
        parser.error("--size tiny needs --out: its figures are not kept with the other results")
    options.budget = options.budget or (3600.0 if options.size == "tiny" else BUDGET)
    options.out = options.out or RESULTS / RECORD
    if IN_CLONE and options.size == "tiny" and options.out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error("--size tiny does not write to benchmarks/results: its figures mean nothing")
    options.cache = (options.cache or options.out.with_suffix(".cache")).resolve()
    return options


def check_record(out: Path, size: str, environment: dict[str, Any]) -> None:
    """Raises BenchmarkError if the file holds something else, or results of another size, device or version."""
    try:
        before = tables.by_part(json.loads(line) for line in (out.read_text().splitlines() if out.exists() else ())).values()
        kinds = {(found["size"], *map(str, map(found["environment"].get, SAME))) for found in before}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{out} was not written by this benchmark: choose another --out") from error
    if others := kinds - {(size, *map(str, map(environment.get, SAME)))}:
        raise BenchmarkError(f"{out} holds results of {' '.join(min(others))}, which is not this: choose another --out")


def run_process(task: Task | None, command: Sequence[str] = COMMAND, **how: Any) -> str:
    """Runs a task, or tells the environment, in a process of its own. Returns how it ended if its work was not done."""
    share = {} if "XLA_CLIENT_MEM_FRACTION" in os.environ else {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE}
    arguments = [*command, *([json.dumps(task._asdict())] if task else [])]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        status = subprocess.run(arguments, cwd=FOLDER, env=share | dict(os.environ), stderr=errors, check=False, **how).returncode
        errors.seek(0)
        return f"the process ended with status {status}: {end_of(errors.read())}" if status else ""


def end_of(said: str) -> str:
    """The end of a process's output, in one line. If the watchdog has ended it: where its main thread was, which comes last."""
    if (hung := said.rfind("Timeout (")) >= 0:
        said = said[hung:].splitlines()[0] + " " + said[said.rfind("(most recent call first):") :][:500]
    return " ".join(said.split())[-600:] or "it said nothing"


def run_part(task: Task, keep: Callable[[dict[str, Any]], None], command: Sequence[str] = COMMAND) -> None:
    """Starts processes until all cases of a part have been started. `keep` adds a line to the record."""
    for _ in range(MOST_ENDS):
        if time.time() > task.deadline:
            return keep({"case": {}, "skipped": OUT_OF_TIME})
        ended, before = run_process(task, command, stdout=2), task.first
        lines = [json.loads(line) for line in Path(task.out).read_text().splitlines()]
        lines = lines[max(number for number, line in enumerate(lines) if "begins" in line) + 1 :]
        if ended and (not lines or "starts" in lines[-1]):  # else a case has failed, which is kept, and broken the device
            keep({"case": lines[-1]["case"] if lines else {}, "skipped" if time.time() > task.deadline else "failed": ended})
        task = task._replace(first=sum("starts" in line for line in lines))
        if not ended or task.first == before:  # it could not even begin: another one would not either
            return
    keep({"case": {}, "skipped": f"{MOST_ENDS} processes ended early: the rest is left out"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if anything failed; skipped cases do not count. Raises BenchmarkError without a GPU."""
    options = parse(arguments)
    began = time.time()
    with tempfile.TemporaryFile("w+") as told:
        if ended := run_process(None, stdout=told):
            raise BenchmarkError(f"JAX reported no devices: {ended}")
        told.seek(0)
        environment = json.loads(told.read().splitlines()[-1])
    if environment["platform"] != "gpu" and options.size != "tiny":
        found = ", ".join(environment["devices"])
        raise BenchmarkError(f"JAX finds no GPU, only {found}: this benchmark needs one; --size tiny --out FILE works anywhere")
    if len(environment["devices"]) < options.tp:
        raise BenchmarkError(f"--tp {options.tp} needs {options.tp} devices, and JAX finds {len(environment['devices'])}")
    environment |= {"tp": options.tp} if options.tp > 1 else {}
    check_record(options.out, options.size, environment)
    print(tables.head(environment, options.size) + "\n", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    for part in (part for part in ORDER if part in options.only):
        started = time.time()

        def keep(line: dict[str, Any], part: str = part) -> None:
            with options.out.open("ab", buffering=0) as file:
                file.write(json.dumps({"part": part, **line}).encode() + b"\n")

        date = datetime.now(UTC).isoformat(timespec="seconds")
        keep({"begins": date, "environment": environment, "size": options.size})
        deadline = began + options.budget - GRACE
        task = Task(part, options.size, str(options.out.resolve()), deadline, str(options.cache), options.tp, parent=os.getpid())
        run_part(task, keep)
        keep({"seconds": time.time() - started})
        measured = tables.by_part(map(json.loads, options.out.read_text().splitlines()))[part]
        failures += len(measured["failed"])
        print(tables.show(part, measured), flush=True)
    print(f"{time.time() - began:.0f} s, {failures} failed; written to {options.out}")
    return 1 if failures else 0
