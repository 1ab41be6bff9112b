"""Everything that only a GPU can tell, in one command of less than eight minutes: are the kernels right, how near to the
memory's bandwidth do they and the whole cycle come, and what does transformers need for the same step.

The model is a Llama 3.1 8B with an EAGLE-3 head, both with random weights, in bfloat16. Sections, the most precious first:

  check    every implementation of every kernel against the reference, on the device
  copy     the bandwidth of a large copy and the speed of a large matrix product: the rooflines of everything below
  cycle    the whole cycle of each tree at batch 1 and context 1024, beside the bytes that it must move
  attention  whole cycles with each attention kernel: what decides which one is the default
  peer     transformers' Llama, static cache, torch.compile with CUDA graphs, the same step; needs torch with CUDA
  compile  how long compiling the 5/4/8 cycle takes, without a cache and with JAX's
  kernels  each implementation of attention at batches 1 to 64 and contexts 512 to 32768
  prefill  chunks of 256 and 2048 tokens
  grid     the whole cycle at batches 1 to 64 and contexts 512 to 32768

Each finding is in the JSON as soon as it is made; what fails or takes too long is noted with its reason, and the rest goes on.

Examples:
    python -m benchmarks.gpu
    python -m benchmarks.gpu --only check copy cycle --budget 120
    python -m benchmarks.gpu --size tiny --out /tmp/tiny.json       # tries it out, on any machine
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from jaxspec.commands.options import Parser

from ..options import RESULTS, BenchmarkError
from .against import run_peer
from .supervisor import GRACE, NoDevice, Supervisor
from .tables import head, show, worth

ORDER = ("check", "copy", "cycle", "attention", "peer", "compile", "kernels", "prefill", "grid")


class Report:
    """Shows progress, and writes all that is known after every message."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._bar = options, tqdm(unit=" case", total=0)
        self.supervisor: Supervisor | None = None
        self._shown: set[str] = set()

    def heard(self, message: dict) -> None:
        """Takes what the supervisor took."""
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
        """The record, once there is something to record; a reader never sees half of one."""
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
        """Prints what no message announced as finished."""
        for section in ORDER:
            self.show(section)
        self._bar.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("jaxspec bench gpu", __doc__)
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: for any device, means nothing")
    parser.add_argument("--only", choices=ORDER, nargs="+", default=list(ORDER), metavar="SECTION", help="sections to run")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which it has ended (default: %(default)g)")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch and transformers (default: this one)")
    parser.add_argument("--out", type=Path, help=f"where the JSON goes (default: {RESULTS.name}/gpu.json; tiny has none)")
    options = parser.parse_args(arguments)
    if options.size == "tiny" and options.out is None:
        parser.error("--size tiny needs --out: its figures are not kept with the others")
    options.out = options.out or RESULTS / "gpu.json"
    if options.size == "tiny" and options.out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error("--size tiny does not write to benchmarks/results: its figures mean nothing")
    return options


def measure(options: argparse.Namespace, deadline: float) -> Supervisor:
    """Runs the sections. The peer has the GPU for itself: the worker before it has ended, and the next starts behind it."""
    report, cache = Report(options), tempfile.mkdtemp(prefix="jaxspec-bench-gpu-")
    report.supervisor = supervisor = Supervisor(options.size, deadline, cache, report.heard)
    chosen = [section for section in ORDER if section in options.only]
    before, after = ([s for s in chosen if (ORDER.index(s) < ORDER.index("peer")) is first] for first in (True, False))
    try:
        supervisor.run(before)
        if "peer" in chosen:
            if not before:
                supervisor.find_device()  # else a worker has told: no record without a GPU, and none that does not name it
            run_peer(supervisor, options.torch_python, options.size, deadline)
        supervisor.run([section for section in after if section != "peer"])
    finally:
        report.close()
        shutil.rmtree(cache, ignore_errors=True)
    return supervisor


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if anything failed (what was skipped did not), or 2 without a GPU."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    try:
        supervisor = measure(options, started + options.budget - GRACE)
    except NoDevice as error:
        raise BenchmarkError(f"{error}: this benchmark needs one, or --size tiny --out FILE to try it out") from error
    print(f"{time.time() - started:.0f} s; written to {options.out}")
    if supervisor.failures:
        print(f"{supervisor.failures} failed: see above", file=sys.stderr)
    return 1 if supervisor.failures else 0
