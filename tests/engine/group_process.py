"""One process of a group of two, for test_hosts.py: python -m tests.engine.group_process WHAT RANK HOST:PORT.

WHAT is `stub` (connections alone; this imports no JAX), `messages` (rank 1 prints how long those of launches take), `load` (an
engine that never runs out of work) or `sources:FILE` (sources.py). SIGUSR1 raises an exception; SIGTERM ends in order.
"""

import itertools
import json
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxspec.engine.host_group import ALONE, Follower, Leader
from jaxspec.engine.hosts import STOP_SIGNAL, Hosts, run_to_the_end
from jaxspec.engine.messages import Kept

KEY = b"the key of the tests"


@dataclass(frozen=True)
class Stub:
    """A program that nobody runs."""

    batch: int = 8


def stub(hosts: Hosts) -> int:
    """Launches every millisecond."""
    if hosts.node_rank:
        follower = Follower(hosts, KEY, "the same")
        signal.signal(signal.SIGTERM, follower.stop)
        for header, data in follower.messages():
            if "compile" in header:
                follower.answer(header["number"])
                continue
            follower.arrays.decode(header, data)
    leader = Leader(hosts, KEY, "the same", on_stop=partial(signal.raise_signal, STOP_SIGNAL))
    is_told = end_when_told()
    with leader.compiling(Stub(), timed=False):
        pass  # the other has set up its signals when this is over
    print("running", flush=True)
    for number in itertools.count():
        if is_told:
            break
        leader.launch(Stub(), [Kept(np.full((8, 64), number, np.int32)), np.arange(8)])
        time.sleep(0.001)
    leader.close()
    return 0


MESSAGES = 2000


def messages(hosts: Hosts) -> int:
    """A cycle's launch each millisecond, whose page table has changed in one entry. Rank 1 prints the microseconds from the launch
    at rank 0 until it could launch, too."""
    import jax.numpy as jnp

    from jaxspec.decoding.programs import CycleProgram
    from jaxspec.engine.following import program_of
    from jaxspec.engine.placed import Placed, leaves_to_send
    from jaxspec.tree_shape import TreeShape

    took: list[float] = []
    if hosts.node_rank:
        follower = Follower(hosts, KEY, "the same")
        for header, data in follower.messages():
            if "compile" in header:
                follower.answer(header["number"])
                continue
            *_, sent = follower.arrays.decode(header, data)
            program_of(header["launch"])  # as a follower does
            assert isinstance(sent, np.ndarray)
            took.append((time.perf_counter_ns() - int(sent[0])) / 1e3)
            if len(took) == MESSAGES:
                print(json.dumps(took), flush=True)
    leader, program = Leader(hosts, KEY, "the same"), CycleProgram(8, 64, TreeShape(3, 1, 4))
    with leader.compiling(program, timed=False):
        pass
    rows, table, on_device = np.arange(8, dtype=np.int32), np.zeros((8, 64), np.int32), jnp.zeros(())
    for number in range(MESSAGES):
        table = table.copy()
        table[number % 8, number % 64] += 1
        arguments = Placed(rows, on_device), Placed(table, on_device), np.array([time.perf_counter_ns()])
        leader.launch(program, leaves_to_send(arguments))
        time.sleep(0.001)
    leader.close()
    return 0


def end_when_told() -> list[int]:
    """Filled by SIGTERM and STOP_SIGNAL."""
    told: list[int] = []
    for number in (signal.SIGTERM, STOP_SIGNAL):
        signal.signal(number, lambda number, _: told.append(number))
    return told


def engine(hosts: Hosts) -> int:
    """A tiny model, whose layers two processes share."""
    from jaxspec.config import EngineConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.following import follow, join
    from jaxspec.engine.program_cache import enable_compilation_cache
    from jaxspec.engine.request import GenerationRequest
    from jaxspec.engine.runner import Start
    from jaxspec.sampling_params import SamplingParams
    from jaxspec.testing import largest_sizes_only, random_eagle, tiny_target
    from jaxspec.tree_shape import TreeShape

    group = join(hosts, KEY)
    enable_compilation_cache()
    target = tiny_target(num_layers=1)
    head, tree = random_eagle(target.config), TreeShape(1, 2, 3)
    fields = dict(max_running_requests=2, prefill_chunk=16, context_length=128, tp_size=hosts.nnodes)

    def made(num_pages: int) -> Engine:
        start = Start(group=ALONE if isinstance(group, Follower) else group)
        return Engine(target, head, None, tree, EngineConfig(**fields, num_pages=num_pages), start=start)

    def ask(made: Engine) -> None:
        for place in range(3):
            made.add(GenerationRequest(tuple(range(40, 60 + place)), SamplingParams(max_tokens=80, temperature=0)))

    if isinstance(group, Follower):
        signal.signal(signal.SIGTERM, group.stop)
        follow(group, lambda num_pages: made(num_pages).runner)
    running = made(40)
    largest_sizes_only(running)
    is_told, has_said = end_when_told(), False
    while not is_told:
        if not running.has_work:
            ask(running)
        running.step()
        if running.counts.generated_tokens and not has_said:
            has_said = True
            print("running", flush=True)
    if isinstance(group, Leader):
        group.close()
    return 0


def sources(hosts: Hosts, asked: Path) -> int:
    """Serves what a file asks for, and writes beside it what was said."""
    import jax

    from jaxspec.engine.following import follow, join
    from jaxspec.engine.program_cache import enable_compilation_cache
    from jaxspec.engine.runner import Start

    group = join(hosts, KEY)
    jax.devices()  # they are there when both have asked for them
    from tests.engine.sources import engine_of, serve  # makes arrays

    enable_compilation_cache()
    setting, cases = pickle.loads(asked.read_bytes())
    if isinstance(group, Follower):
        follow(group, lambda num_pages: engine_of(setting).runner)
    asked.with_name("said").write_bytes(pickle.dumps(serve(setting, cases, Start(group=group))))
    group.close()
    return 0


def raise_error(*_: object) -> None:
    raise RuntimeError("told to fail")


if __name__ == "__main__":
    what, rank, address = sys.argv[1:]
    signal.signal(signal.SIGUSR1, raise_error)
    hosts, (kind, _, file) = Hosts(2, int(rank), address), what.partition(":")
    works = {
        "stub": partial(stub, hosts),
        "messages": partial(messages, hosts),
        "load": partial(engine, hosts),
        "sources": partial(sources, hosts, Path(file)),
    }
    run_to_the_end(hosts, works[kind])
