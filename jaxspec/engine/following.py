"""The processes of a group other than rank 0: each compiles and launches what rank 0 does, in the same order (host_group.py)."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import jax
import jaxlib

from jaxspec.checks import reason_of
from jaxspec.decoding.cycle import Proposal
from jaxspec.decoding.programs import (
    AdmitProgram,
    BatchProgram,
    CatchUpProgram,
    CycleProgram,
    LendProgram,
    MaskProgram,
    PrefillProgram,
    Program,
    ProposeProgram,
    Settlement,
    SettleProgram,
)
from jaxspec.engine.host_group import Follower, Leader
from jaxspec.engine.hosts import STOP_SIGNAL, WRONG_SETTINGS, Hosts, leave
from jaxspec.engine.messages import Kept, Leaf
from jaxspec.engine.relay import relay
from jaxspec.engine.runner import Runner
from jaxspec.tree_shape import TreeShape
from jaxspec.version import own_version

OF_ROWS = AdmitProgram, LendProgram, MaskProgram
PROGRAMS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (*OF_ROWS, CatchUpProgram, CycleProgram, PrefillProgram, ProposeProgram, SettleProgram)
}
"""All kinds of programs."""

logger = logging.getLogger(__name__)


def join(hosts: Hosts, key: bytes) -> Leader | Follower:
    """Waits for the other processes and makes JAX know all their devices. Nothing may have used JAX's devices before. From now on
    STOP_SIGNAL may come to rank 0.

    Raises OSError, AuthenticationError or ValueError as Leader and Follower.
    """
    versions = f"jaxspec {own_version()}, jax {jax.__version__} and jaxlib {jaxlib.__version__}"
    logger.info("%s: the group meets at %s", hosts.name(hosts.node_rank), hosts.dist_init_addr)
    group = Follower(hosts, key, versions) if hosts.node_rank else Leader(hosts, key, versions, on_stop=stop_this_process)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        relay((hosts.address[0], hosts.address[1] + 1)) if hosts.node_rank else hosts.coordinator,
        hosts.nnodes,
        hosts.node_rank,
        cluster_detection_method="deactivate",  # under Slurm it would take only one device
        coordinator_bind_address=hosts.coordinator,  # rank 0's address only; JAX's default is all addresses
    )
    return group


def stop_this_process() -> None:
    """Sends STOP_SIGNAL to this process."""
    os.kill(os.getpid(), STOP_SIGNAL)


def follow(group: Follower, runner_of: Callable[[int], Runner]) -> None:
    """Does what rank 0 tells, for ever: the process ends when rank 0 does. `runner_of`: a Runner with so many pages."""
    launching = threading.Thread(target=_follow, args=[group, runner_of], name="launching", daemon=True)
    launching.start()
    launching.join()  # signals come through while that thread waits in XLA


def _follow(group: Follower, runner_of: Callable[[int], Runner]) -> None:
    repeating: Repeating | None = None
    with ThreadPoolExecutor(os.cpu_count(), "compiler") as pool:
        for header, data in group.messages():
            if "pages" in header:
                repeating = None  # frees its memory before the next takes some
                repeating = Repeating(runner_of(header["pages"]), header["identity"])
            assert repeating is not None
            if "compile" in header:
                repeating.runner.programs.may_time = header["timed"]
                pool.submit(_compile, group, repeating.runner, program_of(header["compile"]), header["number"])
            elif "launch" in header:
                program = program_of(header["launch"])
                repeating.launch(program, group.arrays.decode(header, data))


def _compile(group: Follower, runner: Runner, program: Program, number: int) -> None:
    error = ""
    try:
        runner.programs[program]
        if isinstance(program, BatchProgram):
            runner.inputs.compile_for((program.batch, program.pages))
    except Exception as failed:
        error = reason_of(failed)
    group.answer(number, error)


@lru_cache(1024)
def program_of(described: tuple[str, tuple[Any, ...]]) -> Program:
    """The inverse of messages.described.

    In:  ("CycleProgram", (1, 8, (3, 1, 4)))
    Out: CycleProgram(1, 8, TreeShape(3, 1, 4))
    """
    kind, fields = described
    return PROGRAMS[kind](*(TreeShape(*each) if isinstance(each, tuple) else each for each in fields))


class Repeating:
    """Launches programs with the arrays that rank 0 launches them with."""

    def __init__(self, runner: Runner, identity: str):
        """Ends the process if its programs are not those of rank 0."""
        if runner.programs.digest(runner.params) != identity:
            leave(WRONG_SETTINGS, "jaxspec: this process has another model, other options or other devices than rank 0")
        self.runner = runner
        self._structures: dict[Program, jax.tree_util.PyTreeDef] = {}
        self._proposals = deque[Proposal]()
        """The proposals of first halves of cycles; rank 0 launches the second halves in the order of the first."""

    def launch(self, program: Program, leaves: Sequence[Leaf]) -> None:
        """Launches it. A leaf that is None is on this device already."""
        runner = self.runner
        if program not in self._structures:
            self._structures[program] = jax.tree.structure(runner.programs.inputs(program))
        runs_first = not isinstance(leaves[0], Kept)  # nothing goes before it or follows
        proposal = self._proposals.popleft() if isinstance(program, SettleProgram) and not runs_first else None
        own = self._own(program, proposal, len(leaves)) if any(leaf is None for leaf in leaves) else ()
        arguments: list[Any] = [
            runner.inputs.get(program, str(place), leaf.values) if isinstance(leaf, Kept) else own[place] if leaf is None else leaf
            for place, leaf in enumerate(leaves)
        ]
        output = runner.run(program, *jax.tree.unflatten(self._structures[program], arguments))
        if isinstance(program, ProposeProgram) and not runs_first:
            self._proposals.append(output.proposal)

    def _own(self, program: Program, proposal: Proposal | None, count: int) -> list[Any]:
        """The leaves that are on this device, at their places among `count`."""
        if proposal is not None:
            return [None, None, *jax.tree.leaves(Settlement.of(proposal, None))]  # after rows and page table
        if isinstance(program, AdmitProgram):
            return [*[None] * (count - 1), self.runner.no_bias]
        raise ValueError(f"the arrays of the program ({program}) must be sent")
