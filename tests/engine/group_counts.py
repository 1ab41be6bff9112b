"""How groups of two processes end, counted: python -m tests.engine.group_counts [--times STUB LOAD].

Either process is killed, fails on an exception or is told to end: with connections alone (`stub`) and with engines under load
(`load`). A row has the seconds until the other has ended too, whose status and last words are checked, as is that nothing is left.
`--messages` measures those of launches instead.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.commands.replicas import LOOPBACK, free_ports
from jaxspec.engine.hosts import EXIT

SECONDS = 2.0
"""In which a group ends."""
LONGEST = 300.0
"""Seconds after which a group that has not ended is killed, which fails its test."""
GLOO = "[Gloo]"
"""Begins a line that JAX's collectives write to stdout."""
WAYS = {"killed": signal.SIGKILL, "an exception": signal.SIGUSR1, "told to end": signal.SIGTERM}
"""How one process ends, and the signal for it."""
TIMES = {"stub": 20, "load": 3}
"""How often each way is tried."""


@contextlib.contextmanager
def group(what: str, longest: float = LONGEST) -> Iterator[list[subprocess.Popen]]:
    """Two processes, which are killed after so many seconds, or at the end."""
    command, address = [sys.executable, "-m", "tests.engine.group_process", what], f"{LOOPBACK}:{free_ports(1)[0]}"
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}

    def kill() -> None:
        for each in processes:
            each.kill()

    with contextlib.ExitStack() as until_ended:
        started = (subprocess.Popen([*command, str(rank), address], cwd=Path(__file__).parents[2], **options) for rank in range(2))
        processes = [until_ended.enter_context(each) for each in started]
        until_ended.callback(kill)
        watchdog = threading.Timer(longest, kill)
        until_ended.callback(watchdog.cancel)
        watchdog.start()
        yield processes


def end_group(what: str, victim: int, number: signal.Signals) -> float:
    """Starts a group, ends one process by a signal and checks how both end. Returns the seconds until all have ended."""
    with group(what) as processes:
        assert processes[0].stdout is not None
        said_first = next((line for line in processes[0].stdout if not line.startswith(GLOO)), "")
        assert said_first == "running\n", processes[0].communicate()
        processes[victim].send_signal(number)
        if number is not signal.SIGTERM:
            processes[victim].wait()
        started = time.monotonic()
        for each in processes:
            each.wait()
        seconds = time.monotonic() - started
        statuses = {signal.SIGKILL: (-9, EXIT), signal.SIGUSR1: (EXIT, EXIT), signal.SIGTERM: (0, 0)}[number]
        said = [each.communicate()[1] for each in processes]
        assert (processes[victim].returncode, processes[1 - victim].returncode) == statuses, said
        lines = [line for line in said[1 - victim].splitlines() if not line.startswith(GLOO)]
        gone = f"jaxspec: rank {victim} of 2 is gone; whoever started this group must restart it"
        assert lines == ([] if number is signal.SIGTERM else [gone]), lines
        if number is signal.SIGUSR1:
            last = said[victim].splitlines()[-1]
            assert last.startswith(f"jaxspec: rank {victim} of 2 failed: RuntimeError: told to fail;"), last
        assert not any(is_left(each.pid) for each in processes)
        return seconds


def microseconds() -> list[float]:
    """How long messages of launches take: packing, sending and unpacking."""
    with group("messages") as (_, follower):
        assert follower.stdout is not None
        return json.loads(next(line for line in follower.stdout if not line.startswith(GLOO)))


def is_left(session: int) -> bool:
    """Whether a process group has members."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tests.engine.group_counts", description=__doc__)
    parser.add_argument("--times", type=int, nargs=2, default=list(TIMES.values()), metavar=tuple(map(str.upper, TIMES)))
    parser.add_argument("--messages", action="store_true", help="only measure messages")
    options = parser.parse_args(arguments)
    if options.messages:
        load, quartiles = os.getloadavg()[0], statistics.quantiles(microseconds())
        print("a message of a launch, us (quartiles):", *map(round, quartiles), f"load average {load:.1f}", flush=True)
        return
    print("| what | rank | how it ends | groups | not as it must be | median, s | longest, s |\n|---|---|---|---|---|---|---|")
    for what, times in zip(TIMES, options.times, strict=True):
        for victim in range(2):
            for way, number in WAYS.items():
                seconds, problems = list[float](), list[str]()
                for _ in range(times):
                    try:
                        seconds.append(end_group(what, victim, number))
                    except AssertionError as error:
                        problems.append(str(error))
                problems += [f"{each:.1f} s" for each in seconds if each > SECONDS]
                figures = f"{statistics.median(seconds):.2f} | {max(seconds):.2f}" if seconds else "|"
                print(f"| {what} | {victim} | {way} | {times} | {len(problems)} | {figures} |", flush=True)
                print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)


if __name__ == "__main__":
    main()
