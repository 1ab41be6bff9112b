"""The process of benchmarks.gpu that uses the device: it runs the cases of one part and adds their lines to the record.

A kernel that hangs or breaks the device costs only its own case: a watchdog ends the process when a case is over its limit of time,
and command.py starts another one for the cases after it.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.commands.collect_env import driver

from .. import record
from .lab import SIZES, Cases, Lab, Skip
from .parts import GRACE, ORDER, OUT_OF_TIME, PARTS, Part, Task
from .tables import by_part

START_LIMIT = 240.0
"""Seconds to load JAX and to find the device."""
SLOWER = 4
"""Tiny sizes run on CPUs, which may be busy."""


def run_cases(task: Task, cases: Cases, clock: Callable[[], float] = time.time) -> Iterator[dict[str, Any]]:
    """Runs the cases in order and yields the record's lines, each when it is known."""
    for name, measure in list(cases)[task.first :]:
        line = {"part": task.part, "case": name}
        if clock() > task.deadline:
            yield line | {"skipped": OUT_OF_TIME}
        else:
            yield line | {"starts": clock()}
            yield line | outcome(measure)


def outcome(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case has measured, or why it has not."""
    try:
        return {"row": measure()}
    except Skip as skip:
        return {"skipped": str(skip)}
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if "RESOURCE_EXHAUSTED" in reason or "out of memory" in reason:
            return {"skipped": f"out of memory: {reason}"}
        traceback.print_exc()
        return {"failed": reason}


def check_device() -> None:
    """Raises an exception if the device no longer works: an error in one kernel may have broken its context."""
    assert float(jnp.arange(3.0).sum()) == 3


def watch(limit: float, deadline: float) -> None:
    """After so many seconds, or at the end of the budget, prints where all threads are and ends this process."""
    faulthandler.dump_traceback_later(max(1.0, min(limit, deadline + GRACE - time.time())), exit=True)


def main() -> None:
    """Reads the task, one JSON object, from the command line. Without one, prints the environment."""
    watch(START_LIMIT, float("inf"))
    if len(sys.argv) == 1:
        found = {**record.environment(os.getloadavg()[0]), "platform": jax.devices()[0].platform, "driver": driver()}
        print(json.dumps(found), flush=True)
        os._exit(0)
    task = Task(**json.loads(sys.argv[1]))
    part, known = PARTS[ORDER.index(task.part)], by_part(map(json.loads, Path(task.out).read_text().splitlines()))
    copies = known["copy"]["rows"] if "copy" in known else []
    lab = Lab(SIZES[task.size], *(row["bytes_per_second"] for row in copies), tp=task.tp)
    jax.config.update("jax_compilation_cache_dir", task.cache)  # of compiled programs and the results of autotuning
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with open(task.out, "ab", buffering=0) as out:
        for line in run_cases(task, cases_of(part, lab)):
            out.write(json.dumps(line).encode() + b"\n")  # in one step, so that a killed run leaves whole lines
            if os.getppid() != task.parent:  # the process that started this one is gone
                break
            if "starts" in line:
                print(f"{part.name}: {' '.join(map(str, line['case'].values()))}", flush=True)
                watch(part.limit * (SLOWER if task.size == "tiny" else 1), task.deadline)
            elif "failed" in line:
                check_device()
    os._exit(0)  # not through the destructors of a device that may be broken


def cases_of(part: Part, lab: Lab) -> Cases:
    """The cases of a part. Only its module is imported."""
    module, function = part.function.split(".")
    return vars(import_module(f".{module}", __package__))[function](lab)
