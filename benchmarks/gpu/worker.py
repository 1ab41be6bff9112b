"""The process of benchmarks.gpu that uses the device: runs sections and prints results, one JSON object per line.

It is a separate process, so that a kernel that hangs or breaks the device costs only its own section.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.commands.collect_env import driver

from .. import record
from . import cycles, kernels
from .lab import Lab, Skip
from .sizes import SIZES

Send = Callable[..., None]


class Case(NamedTuple):
    """One thing to measure."""

    name: dict[str, Any]
    """The first columns of its row."""
    measure: Callable[[], dict[str, Any]]
    """Returns the other columns. Raises Skip if it cannot be measured here."""


Section = Callable[[Lab], Iterable[tuple[dict, Callable[[], dict]]]]
SECTIONS: dict[str, Section] = {
    "check": kernels.check,
    "copy": kernels.copy,
    "cycle": cycles.goals,
    "attention": cycles.by_attention,
    "compile": cycles.compiling,
    "kernels": kernels.times,
    "prefill": cycles.prefills,
    "grid": cycles.grid,
}


SECONDS = {"check": 120.0, "kernels": 110.0, "prefill": 60.0}
"""The most seconds for these sections, so that later ones get their turn."""


class DeviceLost(Exception):
    """After a failure not even a trivial program runs, so the process must be restarted."""


def run_sections(names: Sequence[str], sections: dict[str, Section], lab: Lab, deadline: float, send: Send) -> None:
    """Runs the sections in order. Cases that fail or are out of time are reported, and the rest continues."""
    for name in names:
        started = time.time()
        try:
            cases = [Case(*case) for case in sections[name](lab)]
        except Exception as error:  # it must not stop the other sections
            send(kind="section", section=name, cases=0)
            send(kind="failed", section=name, case={}, error=describe(error))
            cases = []
        else:
            send(kind="section", section=name, cases=len(cases))
        run_cases(name, cases, min(deadline, started + SECONDS.get(name, float("inf"))), send)
        send(kind="finished", section=name, seconds=time.time() - started)


def run_cases(section: str, cases: Sequence[Case], deadline: float, send: Send) -> None:
    """Runs every case that ends before the deadline if it takes no longer than the longest one so far."""
    longest = 0.0
    for case in cases:
        started = time.time()
        if started + longest > deadline:
            reason = f"time budget: {max(0.0, deadline - started):.0f} s are left, and one case here took {longest:.0f} s"
            send(kind="skipped", section=section, case=case.name, reason=reason)
            continue
        send(kind="case", section=section, case=case.name)
        try:
            send(kind="row", section=section, row={**case.name, **case.measure()})
        except Skip as skip:
            send(kind="skipped", section=section, case=case.name, reason=str(skip))
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                send(kind="skipped", section=section, case=case.name, reason=f"out of memory: {describe(error)}")
            else:
                send(kind="failed", section=section, case=case.name, error=describe(error))
                traceback.print_exc()
                check_device()
        longest = max(longest, time.time() - started)


def check_device() -> None:
    """Raises DeviceLost if the device no longer works: an error in one kernel may have broken its context."""
    try:
        assert float(jnp.arange(3.0).sum()) == 3
    except Exception as error:
        raise DeviceLost(describe(error)) from error


def describe(error: Exception) -> str:
    """The type and the beginning of the message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def environment() -> dict[str, Any]:
    """The environment of the record."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None
    return {**record.environment(os.getloadavg()[0]), "platform": device.platform, "memory_limit": limit, "driver": driver()}


def main() -> None:
    """Reads the task, one JSON object, from the command line."""
    task = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not garble the answers

    def send(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    jax.config.update("jax_compilation_cache_dir", task["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    send(kind="environment", environment=environment())
    if jax.devices()[0].platform != "gpu" and task["size"] != "tiny":
        return
    lab = Lab(SIZES[task["size"]], task["bandwidth"], task["arithmetic"])
    run_sections(task["sections"], SECTIONS, lab, task["deadline"], send)
