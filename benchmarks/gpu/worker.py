"""The process of benchmarks.gpu that uses the device: runs the cases of one part and prints results, one JSON object per line.

It is a separate process, so that a kernel that hangs or breaks the device costs only its own case.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.commands.collect_env import driver

from .. import record
from .lab import Lab, Skip
from .parts import PARTS
from .sizes import SIZES

HEARTBEAT = 2.0
"""Seconds between two signs of life, which also show that the parent still listens."""


class Case(NamedTuple):
    """One thing to measure."""

    name: dict[str, Any]
    """The first columns of its row."""
    measure: Callable[[], dict[str, Any]]
    """Returns the other columns. Raises Skip if it cannot be measured here."""


Send = Callable[..., None]
Section = Callable[[Lab, str], Iterable[tuple[dict, Callable[[], dict]]]]
"""The cases of a part, for one of its runs by name."""


class DeviceLost(Exception):
    """After a failure not even a trivial program runs, so the process must be restarted."""


class Task(NamedTuple):
    """What a worker is to do."""

    part: str
    run: str = ""
    done: Sequence[dict] = ()
    """Cases that earlier workers have started."""
    alone: bool = False
    """One case only, and those before it that are skipped."""
    deadline: float = float("inf")
    until: float = float("inf")
    """No case starts later, except that compiling does not count."""
    uses_jax: bool = True


def find_section(part: str) -> Section:
    """The function that parts.PARTS names. Only its module is imported: some parts start many processes."""
    module, function = next(each.function for each in PARTS if each.name == part).split(".")
    return getattr(import_module(f".{module}", __package__), function)


def run_cases(task: Task, section: Section, lab: Lab, send: Send) -> None:
    """Runs the cases in order. Those that fail or are out of time are reported, and the rest continues."""
    part = task.part
    try:
        every = [Case(*case) for case in section(lab, task.run)]
    except Exception as error:
        send(kind="failed", part=part, case={"run": task.run} if task.run else {}, error=describe(error))
        every = []
    cases = [case for case in every if case.name not in task.done]
    send(kind="cases", part=part, cases=len(every), left=len(cases))
    for number, case in enumerate(cases):
        if (reason := out_of_time(task, lab)) is not None:
            send(kind="skipped", part=part, case=case.name, reason=reason)
            continue
        send(kind="case", part=part, case=case.name)
        ran = run_case(task, case, send)
        if task.alone and ran and number + 1 < len(cases):
            return
    send(kind="all", part=part)


def out_of_time(task: Task, lab: Lab) -> str | None:
    """The reason not to start another case; None if there is time."""
    if time.time() > task.deadline:
        return "time budget: no time was left"
    if time.time() > task.until + lab.compiling:
        return "the part's share of the time was over"
    return None


def run_case(task: Task, case: Case, send: Send) -> bool:
    """False: it was skipped, so the process is as new. Raises DeviceLost if nothing else can be measured in this process."""
    try:
        send(kind="row", part=task.part, row={**case.name, **case.measure()})
    except Skip as skip:
        send(kind="skipped", part=task.part, case=case.name, reason=str(skip))
        return False
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error):
            send(kind="skipped", part=task.part, case=case.name, reason=f"out of memory: {describe(error)}")
        else:
            send(kind="failed", part=task.part, case=case.name, error=describe(error))
            traceback.print_exc()
            if task.uses_jax:
                check_device()
    return True


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


def beat(send: Send) -> None:
    """Sends signs of life until the parent is gone; then ends this process and all that it started."""
    while True:
        time.sleep(HEARTBEAT)
        try:
            send(kind="alive")
        except (OSError, ValueError):
            os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Reads the task, one JSON object, from the command line."""
    given = json.loads(sys.argv[1])
    answers, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)  # libraries that print must not garble the answers
    faulthandler.register(signal.SIGUSR1)

    def send(**message: Any) -> None:
        with lock:
            print(json.dumps(message), file=answers, flush=True)

    threading.Thread(target=beat, args=(send,), daemon=True).start()
    task = Task(**{name: given[name] for name in Task._fields})
    lab = Lab(
        SIZES[given["size"]], given["bandwidth"], given["arithmetic"], lambda phase: send(kind="phase", phase=phase), given["cache"]
    )
    if task.uses_jax:
        lab.use_cache()
        send(kind="environment", environment=environment())
        if (jax.devices()[0].platform != "gpu" and given["size"] != "tiny") or task.part is None:
            return
    run_cases(task, find_section(task.part), lab, send)
    answers.flush()
    os._exit(0)  # not through the destructors of a device that may be broken
