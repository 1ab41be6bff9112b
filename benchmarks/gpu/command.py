"""Checks every kernel on a GPU and times the programs of an 8B model, in less than eight minutes: how close do attention and whole
cycles come to the memory bandwidth, and how long does transformers take for the same step?

The model is a Llama 3.1 8B with an EAGLE-3 head, both with random weights, in bfloat16. Sections, the most important first:

  check    every implementation of every kernel against the reference, on the device
  copy     the bandwidth of a large copy and the speed of a large matrix product: the rooflines of all other sections
  cycle    the whole cycle of each tree at batch 1 and context 1024, with the bytes that it must move
  attention  whole cycles with each attention kernel, to choose the default
  peer     transformers' Llama, static cache, torch.compile with CUDA graphs, the same step; needs torch with CUDA
  compile  how long compiling the 5/4/8 cycle takes, without a cache and with JAX's
  kernels  each implementation of attention at batches 1 to 64 and contexts 512 to 32768
  prefill  chunks of 256 and 2048 tokens
  grid     the whole cycle at batches 1 to 64 and contexts 512 to 32768

Every finding is written at once. What fails or takes too long is recorded with its reason, and the rest continues. Random weights
accept no draft, so tokens per second of trees are given at assumed accept lengths.

Examples:
    jaxspec bench gpu
    jaxspec bench gpu --only check copy cycle --budget 120
    jaxspec bench gpu --size tiny --out tiny.json       # on any machine: does the benchmark work?
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from jaxspec.commands.options import Parser

from .. import record
from ..options import IN_CLONE, RESULTS, BenchmarkError
from ..record import Spread
from .peer import run_peer
from .supervisor import GRACE, NoDevice, Supervisor

Row = Mapping[str, Any]
Column = Callable[[Row], str]


def spread(name: str) -> Column:
    return lambda row: str(Spread(row[name]))


def text(name: str) -> Column:
    return lambda row: str(row[name])


def number(name: str, digits: int, divided_by: float = 1.0) -> Column:
    return lambda row: f"{row[name] / divided_by:.{digits}f}"


def assumed_speeds(row: Row) -> str:
    return ", ".join(f"{speed:.0f} at {length}" for length, speed in row["tokens_per_second_at_assumed_accept_length"].items())


CYCLE: dict[str, Column] = {
    "tree": text("tree"),
    "batch": text("batch"),
    "context": text("context"),
    "cycle, ms (min..max)": spread("milliseconds"),
    "GB moved at least": number("bytes", 2, 1e9),
    "byte roofline, ms": number("byte_roofline_ms", 2),
    "share": number("share_of_byte_roofline", 2),
    "arithmetic roofline, ms": number("arithmetic_roofline_ms", 2),
    "tokens/s at ASSUMED accept length": assumed_speeds,
}
COLUMNS: dict[str, dict[str, Column]] = {
    "check": {
        "kernel": text("kernel"),
        "implementation": text("implementation"),
        "shape": text("shape"),
        "largest error": lambda row: f"{row['error']:.2g}",
        "allowed": lambda row: f"{row['bound']:.2g}",
    },
    "copy": {
        "copied, GB": number("copied_bytes", 2, 1e9),
        "read and written, GB/s": number("bytes_per_second", 1, 1e9),
        "matrix product, TFLOP/s": number("operations_per_second", 2, 1e12),
    },
    "cycle": CYCLE,
    "attention": {"attention": text("attention"), **CYCLE},
    "peer": {
        "": text("name"),
        "step, ms (min..max)": spread("milliseconds"),
        "tokens/s": lambda row: f"{1e3 / median(row['milliseconds']):.1f}",
        "x our plain cycle": lambda row: f"{row['over_plain_cycle']:.2f}" if "over_plain_cycle" in row else "",
    },
    "compile": {
        "program": text("program"),
        "": text("way"),
        "trace and lower, s": number("lower_seconds", 2),
        "compile or load, s": number("compile_seconds", 2),
        "found in the cache": text("found_in_cache"),
    },
    "kernels": {
        "implementation": text("implementation"),
        "batch": text("batch"),
        "context": text("context"),
        "rows": text("rows"),
        "call, us (min..max)": spread("microseconds"),
        "MB read": number("bytes", 2, 1e6),
        "roofline, us": number("roofline_microseconds", 2),
        "share": number("share", 2),
    },
    "prefill": {
        "chunk": text("chunk"),
        "context": text("context"),
        "ms (min..max)": spread("milliseconds"),
        "tokens/s": number("tokens_per_second", 0),
        "share of the arithmetic peak": number("share_of_arithmetic_peak", 2),
    },
    "grid": CYCLE,
}
"""Header and content of the columns of each section."""


def show(section: str, found: Mapping[str, Any]) -> str:
    """A section's table, and lines for what was skipped or failed."""
    columns = COLUMNS[section]
    parts = [f"{section} ({found.get('seconds', 0):.0f} s)"]
    if found["rows"]:
        parts.append(record.table(list(columns), [[column(row) for column in columns.values()] for row in found["rows"]]))
    for kind, key in (("skipped", "reason"), ("failed", "error")):
        parts += [f"{kind}: {name}: {reason}" for name, reason in by_reason(found[kind], key).items()]
    return "\n".join(parts) + "\n"


def by_reason(entries: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    """Cases with the same reason, joined; the JSON names all of them."""
    joined: dict[str, list[str]] = {}
    for entry in entries:
        joined.setdefault(entry[key], []).append(" ".join(map(str, entry["case"].values())) or "all")
    return {"; ".join(names[:3]) + more(len(names) - 3): reason for reason, names in joined.items()}


def more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def head(environment: Mapping[str, Any], size: str) -> str:
    """Where the figures come from."""
    devices = ", ".join(environment.get("devices", ["no device"]))
    lines = [
        f"{environment.get('date')}, {devices}, {'; '.join(environment.get('driver', [])) or 'no NVIDIA driver'}",
        f"jax {environment.get('jax')}, jaxlib {environment.get('jaxlib')}, jaxspec {environment.get('jaxspec')}",
    ]
    note = worth(environment, size)
    return "\n".join([*lines, *([note] if note else [])])


def worth(environment: Mapping[str, Any], size: str) -> str | None:
    """A warning if the figures say nothing about a GPU with a real model."""
    if environment.get("platform") != "gpu":
        return "NOT A GPU: these figures only show that the benchmark works"
    return "tiny sizes: these figures only show that the benchmark works" if size == "tiny" else None


ORDER = ("check", "copy", "cycle", "attention", "peer", "compile", "kernels", "prefill", "grid")


class Report:
    """Shows progress, and writes all results after every message."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._bar = options, tqdm(unit=" case", total=0)
        self.supervisor: Supervisor | None = None
        self._shown: set[str] = set()

    def heard(self, message: dict) -> None:
        """Handles a message that the supervisor has taken."""
        assert self.supervisor
        match message["kind"]:
            case "environment" if not self._shown:
                self._bar.write(head(self.supervisor.environment, self._options.size) + "\n", file=sys.stdout)
                self._shown.add("environment")
            case "section":
                self._bar.total += message["cases"]
                self._bar.set_description(message["section"])
            case "row" | "skipped" | "failed":
                self._bar.update()
            case "finished":
                self.show(message["section"])
        self.write()

    def show(self, section: str) -> None:
        """Prints a section's table, once."""
        assert self.supervisor
        if section in self.supervisor.results and section not in self._shown:
            self._shown.add(section)
            self._bar.write(show(section, self.supervisor.results[section]), file=sys.stdout)
            sys.stdout.flush()

    def write(self) -> None:
        """Writes the record in one step, so that a reader never sees half of it."""
        assert self.supervisor
        if not self.supervisor.results:
            return
        out, environment = self._options.out, self.supervisor.environment
        flags = {name: value for name, value in vars(self._options).items() if name not in ("out", "torch_python")}
        note = worth(environment, self._options.size) if environment else None
        content = {
            "benchmark": "gpu",
            "environment": environment,
            **({"note": note} if note else {}),
            "flags": flags,
            "results": self.supervisor.results,
        }
        unfinished = out.with_name(out.name + ".tmp")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(out)

    def close(self) -> None:
        """Prints the sections that did not finish."""
        for section in ORDER:
            self.show(section)
        self._bar.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("jaxspec bench gpu", __doc__)
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: for any device; means nothing")
    parser.add_argument("--only", choices=ORDER, nargs="+", default=list(ORDER), metavar="SECTION", help="sections to run")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all of it (default: %(default)g)")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch and transformers (default: this one)")
    parser.add_argument("--out", type=Path, help="the JSON file (default: gpu.json; required for --size tiny)")
    options = parser.parse_args(arguments)
    if options.size == "tiny" and options.out is None:
        parser.error("--size tiny needs --out: its figures are not kept with the other results")
    options.out = options.out or RESULTS / "gpu.json"
    if IN_CLONE and options.size == "tiny" and options.out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error("--size tiny does not write to benchmarks/results: its figures mean nothing")
    return options


def measure(options: argparse.Namespace, deadline: float) -> Supervisor:
    """Runs the sections. The peer runs while no worker is alive, so it has the GPU for itself."""
    report, cache = Report(options), tempfile.mkdtemp(prefix="jaxspec-bench-gpu-")
    report.supervisor = supervisor = Supervisor(options.size, deadline, cache, report.heard)
    chosen = [section for section in ORDER if section in options.only]
    before, after = ([s for s in chosen if (ORDER.index(s) < ORDER.index("peer")) is first] for first in (True, False))
    try:
        supervisor.run(before)
        if "peer" in chosen:
            if not before:
                supervisor.find_device()  # no record without a GPU; the other sections' worker checks this too
            run_peer(supervisor, options.torch_python, options.size, deadline)
        supervisor.run([section for section in after if section != "peer"])
    finally:
        report.close()
        shutil.rmtree(cache, ignore_errors=True)
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
