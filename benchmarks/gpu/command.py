"""The first hour on a GPU: does everything work, how close do kernels and whole cycles come to the memory bandwidth, and where does
the rest of the time go?

The model is a Llama 3.1 8B with an EAGLE-3 head, both with random weights, in bfloat16. Parts, the most important first:

PARTS
Each part is useful alone. Every result is written at once, so a run may be killed at any time. What fails, hangs or does not fit is
recorded with its reason, and the rest continues. A later run with the same --out adds its parts. Random weights accept no draft,
so tokens per second of trees are given at assumed accept lengths.

Examples:
    jaxspec bench gpu --only probe copy gemm
    jaxspec bench gpu --only cycle flags
    jaxspec bench gpu --size tiny --out tiny.json       # on any machine: does the benchmark work?
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.commands.options import Parser

from ..options import IN_CLONE, RESULTS, BenchmarkError
from . import tables
from .parts import ORDER, PARTS, Part
from .supervisor import GRACE, NoDevice, Supervisor

BUDGET = 570.0
"""Seconds: where GPUs are lent, a command often has ten minutes."""
NOT_FLAGS = ("out", "cache")
SAME = ("devices", "jax", "jaxlib")
"""Fields of the environment that must be equal in all runs of a record."""


class Report:
    """Shows progress, and writes all results after every message."""

    def __init__(self, options: argparse.Namespace, earlier: dict[str, Any]):
        self._options, self._bar = options, tqdm(unit=" case", total=0, disable=None)
        self.supervisor: Supervisor | None = None
        self._earlier = earlier
        self._counted: set[tuple] = set()

    def heard(self, message: dict) -> None:
        """Handles a message that the supervisor has taken."""
        assert self.supervisor
        match message["kind"]:
            case "environment" if not self._counted:
                self._counted.add(())
                self.check_earlier()
                self._bar.write(tables.head(self.supervisor.environment, self._options.size) + "\n", file=sys.stdout)
            case "cases":
                if message["left"] == message["cases"]:  # the first process of this run
                    self._bar.total += message["cases"]
                self._bar.set_description(message["part"])
            case "row" | "skipped" | "failed":
                self._bar.update()
            case "alive":
                self._bar.set_postfix_str(self.supervisor.doing)
                return
            case "finished":
                part = message["part"]
                self._bar.write(tables.show(part, self.supervisor.results[part]), file=sys.stdout)
                sys.stdout.flush()
        self.write()

    @property
    def results(self) -> dict[str, Any]:
        """Those of this run, and earlier ones of other parts, in the order of parts."""
        assert self.supervisor
        both = self._earlier.get("results", {}) | self.supervisor.results
        return {part: both[part] for part in ORDER if part in both}

    @property
    def has_results(self) -> bool:
        """Whether this run has any: without a GPU there is nothing to write."""
        assert self.supervisor
        return any(found[kind] for found in self.supervisor.results.values() for kind in ("rows", "skipped", "failed"))

    def check_earlier(self) -> None:
        """Raises BenchmarkError if the file holds results of another device or of other versions."""
        assert self.supervisor
        before, now = self._earlier.get("environment", {}), self.supervisor.environment
        for name in SAME:
            if before and before.get(name) != now.get(name):
                raise BenchmarkError(
                    f"{self._options.out} holds results of {name} {before.get(name)}, and here it is {now.get(name)}: "
                    "choose another --out"
                )

    def write(self) -> None:
        """Writes the record in one step, so that a reader never sees half of it."""
        assert self.supervisor
        if not self.has_results:
            return
        out, environment = self._options.out, self.supervisor.environment or self._earlier.get("environment", {})
        flags = {name: value for name, value in vars(self._options).items() if name not in NOT_FLAGS}
        note = tables.worth(environment, self._options.size) if environment else None
        content = {
            "benchmark": "gpu",
            "environment": environment,
            **({"note": note} if note else {}),
            "flags": flags,
            "results": self.results,
        }
        unfinished = out.with_name(out.name + ".tmp")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(out)

    def close(self) -> None:
        """Prints the summary of all runs."""
        assert self.supervisor
        self._bar.close()
        if self.has_results:
            environment = self.supervisor.environment or self._earlier.get("environment", {})
            print(tables.summary(self.results, environment, self._options.size))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    about = "".join(f"  {part.name:<10} {part.about}\n" for part in PARTS)
    parser = Parser("jaxspec bench gpu", (__doc__ or "").replace("PARTS\n", about + "\n"))
    about = "tiny: for any device, with two settings of XLA; means nothing"
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help=about)
    parser.add_argument("--only", choices=ORDER, nargs="+", default=list(ORDER), metavar="PART", help="parts to run")
    parser.add_argument("--budget", type=float, help=f"seconds for all of it (default: {BUDGET:g}; tiny: an hour)")
    parser.add_argument("--out", type=Path, help="the JSON file (default: gpu.json; required for --size tiny)")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="compiled programs and autotuning (default: FILE.cache beside --out)"
    )
    options = parser.parse_args(arguments)
    if options.size == "tiny" and options.out is None:
        parser.error("--size tiny needs --out: its figures are not kept with the other results")
    options.budget = options.budget or (3600.0 if options.size == "tiny" else BUDGET)
    options.out = options.out or RESULTS / "gpu.json"
    if IN_CLONE and options.size == "tiny" and options.out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error("--size tiny does not write to benchmarks/results: its figures mean nothing")
    options.cache = (options.cache or options.out.with_suffix(".cache")).resolve()
    return options


def earlier(out: Path, size: str) -> dict[str, Any]:
    """The record that is there. Raises BenchmarkError if it is something else."""
    if not out.exists():
        return {}
    try:
        found = json.loads(out.read_text())
        if found["benchmark"] == "gpu" and found["flags"]["size"] == size:
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise BenchmarkError(f"{out} was not written by this benchmark with --size {size}: choose another --out")


def tried(part: Part) -> Part:
    """The part as --size tiny runs it: at most two of its runs, because XLA's settings for GPUs change nothing elsewhere."""
    return replace(part, runs=part.runs[:2])


def measure(options: argparse.Namespace, deadline: float) -> Supervisor:
    """Runs the parts."""
    report = Report(options, earlier(options.out, options.size))
    report.supervisor = supervisor = Supervisor(options.size, deadline, str(options.cache), report.heard)
    try:
        supervisor.run([tried(part) if options.size == "tiny" else part for part in PARTS if part.name in options.only])
    finally:
        report.close()
    return supervisor


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if anything failed; skipped cases do not count. Raises BenchmarkError without a GPU."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    try:
        supervisor = measure(options, started + options.budget - GRACE)
    except NoDevice as error:
        raise BenchmarkError(f"{error}: this benchmark needs one; --size tiny --out FILE works anywhere") from error
    print(f"{time.time() - started:.0f} s; written to {options.out}")
    if supervisor.failures:
        print(f"{supervisor.failures} failed: see above", file=sys.stderr)
    return 1 if supervisor.failures else 0
