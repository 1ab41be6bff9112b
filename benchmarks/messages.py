"""What a message between the processes of a group costs: a cycle's launch, whose page table has changed in one entry.

Two processes on this machine. `send` is the time that rank 0 spends on it, `arrive` the time until the other has decoded it.

    python -m benchmarks.messages
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.engine.hosts import Follower, Hosts, Leader, run_to_the_end
from jaxspec.engine.messages import Kept

KEY = b"both ends are here"


@dataclass(frozen=True)
class Cycle:
    """Stands for the program."""

    batch: int
    pages: int


def follow(hosts: Hosts) -> int:
    """Prints the microseconds between the sending and the end of decoding, one per message; the clock is the machine's."""
    follower = Follower(hosts, KEY, "")
    for header, data in follower.messages():
        if "compile" in header:
            follower.answer(header["number"])
            continue
        *_, sent = follower.arrays.decode(Cycle(*header["launch"][1]), header["arrays"], data)
        print((time.perf_counter_ns() - int(np.asarray(sent)[0])) / 1e3, flush=True)
    return 0


def lead(hosts: Hosts, messages: int) -> int:
    """Prints the medians as JSON."""
    command = [sys.executable, "-m", __spec__.name, "--address", str(hosts.dist_init_addr), "--rank", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        leader = Leader(hosts, KEY, "")
        with leader.compiling(Cycle(8, 64), timed=False):
            pass
        table, rows, sent, arrived = np.zeros((8, 64), np.int32), np.arange(8, dtype=np.int32), [], []
        for number in range(messages):
            table = table.copy()
            table[number % 8, number % 64] += 1
            started = time.perf_counter_ns()
            leader.launch(Cycle(8, 64), [Kept(rows), Kept(table), np.array([started])])
            sent.append((time.perf_counter_ns() - started) / 1e3)
            arrived.append(float(other.stdout.readline()))  # type: ignore[union-attr]
        leader.close()
    quartiles = {
        name: np.percentile(times, [25, 50, 75]).round(1).tolist() for name, times in {"send": sent, "arrive": arrived}.items()
    }
    print(json.dumps({"messages": messages, "us, quartiles": quartiles}))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.messages", description=__doc__, allow_abbrev=False)
    parser.add_argument("--address", default="127.0.0.1:29511", help="where they meet (default: %(default)s)")
    parser.add_argument("--messages", type=int, default=2000, help="how many are sent (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    hosts = Hosts(2, options.rank, options.address)
    run_to_the_end(hosts, lambda: follow(hosts) if options.rank else lead(hosts, options.messages))


if __name__ == "__main__":
    sys.exit(main())
