"""The process of benchmarks.gpu that uses the device: it runs the cases of one part and prints a line of JSON for each.

It is a process of its own, so that a kernel that hangs or breaks the device costs only its own case: a watchdog ends the process
when a case is over its limit of time, and command.py starts another one for the cases behind it.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.commands.collect_env import driver

from .. import record
from .lab import Cases, Lab, Skip
from .parts import GRACE, ORDER, OUT_OF_TIME, PARTS, Part, Task
from .sizes import SIZES

START_LIMIT = 240.0
"""Seconds to load JAX and to find the device."""
SLOWER = 4
"""Tiny sizes run on CPUs, which may be busy."""


def run_cases(task: Task, cases: Cases, clock: Callable[[], float] = time.time) -> Iterator[dict[str, Any]]:
    """Runs the cases in order and yields messages: {"starts"} before one runs, {"case"} with its "row", or why there is none.

    A part's first case runs even if its turn is over: an earlier part may have taken longer than it should.
    """
    for number, (name, measure) in enumerate(cases):
        if number < task.first:
            continue
        if clock() > (min(task.until, task.deadline) if number else task.deadline):
            yield {"case": name, "skipped": OUT_OF_TIME}
        else:
            yield {"starts": name}
            yield {"case": name, **outcome(measure)}


def outcome(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case has measured, or why it has not."""
    try:
        return {"row": measure()}
    except Skip as skip:
        return {"skipped": str(skip)}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error):
            return {"skipped": f"out of memory: {describe(error)}"}
        traceback.print_exc()
        return {"failed": describe(error)}


def describe(error: Exception) -> str:
    """The type and the beginning of the message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def check_device() -> None:
    """Raises an exception if the device no longer works: an error in one kernel may have broken its context."""
    assert float(jnp.arange(3.0).sum()) == 3


def environment() -> dict[str, Any]:
    """The environment of the record."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None
    return {**record.environment(os.getloadavg()[0]), "platform": device.platform, "memory_limit": limit, "driver": driver()}


def end_with_parent() -> None:
    """Ends this process and all that it started when the parent, which holds the other end of stdin, is gone."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def watch(limit: float, task: Task) -> None:
    """After so many seconds, or at the end of the budget, prints where all threads are and ends this process."""
    faulthandler.dump_traceback_later(max(1.0, min(limit, task.deadline + GRACE - time.time())), exit=True)


def main() -> None:
    """Reads the task, one JSON object, from the command line."""
    task = Task(**json.loads(sys.argv[1]))
    watch(START_LIMIT, task)
    threading.Thread(target=end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not garble the answers
    if task.part is None:
        print(json.dumps(environment()), file=answers)
    else:
        part, lab = PARTS[ORDER.index(task.part)], Lab(SIZES[task.size], task.bandwidth, task.arithmetic, task.cache)
        if part.uses_jax:
            lab.use_cache()
        for message in run_cases(task, cases_of(part, lab)):
            print(json.dumps(message), file=answers)
            if "starts" in message:
                watch(part.limit * (SLOWER if task.size == "tiny" else 1), task)
            elif "failed" in message and part.uses_jax:
                check_device()
    os._exit(0)  # not through the destructors of a device that may be broken


def cases_of(part: Part, lab: Lab) -> Cases:
    """The cases of a part. Only its module is imported."""
    module, function = part.function.split(".")
    return getattr(import_module(f".{module}", __package__), function)(lab)
