"""The compiled programs: each is compiled ahead of time, in the background or at its first use, and called by name."""

import atexit
import contextlib
import ctypes
import hashlib
import itertools
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.checks import reason_of
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.programs import CycleProgram, Program
from jaxspec.decoding.state import State
from jaxspec.engine.host_group import ALONE, HostGroup
from jaxspec.engine.program_cache import CacheHits, StoredTraces, removing_damaged, stored_traces
from jaxspec.engine.program_table import NO_PROGRAMS, ProgramCount, ProgramTable
from jaxspec.engine.progress import CompilingProgress
from jaxspec.placement import ONE_DEVICE, Placement
from jaxspec.tree_shape import TreeShape
from pallas_kernels.dispatch import lowered_for

logger = logging.getLogger(__name__)

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""What differs between processes in the printed form of a module that holds functions."""
LOOK_AGAIN = 1.0
"""Seconds after which a start that compiles shows its progress again, even if there is none."""
STOP_NOW, URGENT, LATER = range(3)
"""Places in the compiler's queue: the end of the compiler, what a request waits for, and what would make requests faster."""
COMPILING_THREADS = ("tf_XLACompile", "llvm-worker")
"""The names of XLA's threads."""


class ProgramError(RuntimeError):
    """A program can't be compiled, or fails on its first run. The message is one line and names it."""

    @classmethod
    def of(cls, program: Program, failed: str, error: Exception) -> "ProgramError":
        return cls(f"the program ({program}) {failed}: {reason_of(error)}")


class Compilation(NamedTuple):
    """How a program was compiled."""

    seconds: float
    """Other programs may have been compiled at the same time."""
    from_cache: bool
    """JAX had it in its persistent cache. (Not known of a program that was compiled when it was first needed: False.)"""


class Programs:
    """Compiled programs by name. After `seal` a launch never compiles: it takes a larger program, or fails if there is none."""

    def __init__(
        self,
        merge: Callable[[dict], Models],
        params: dict,
        state: State,
        table: ProgramTable = NO_PROGRAMS,
        placement: Placement = ONE_DEVICE,
        group: HostGroup = ALONE,
    ):
        """Only the shapes of `params` and `state` are kept. `table`: what launches choose from. `group`: processes that
        compile the same programs."""
        self.traces: StoredTraces | None = stored_traces(ADDRESS.sub("", repr(merge)), placement)
        """Where traced programs are kept, if they are: a process with the same models and options need not trace them again."""
        self.compilations: dict[Program, Compilation] = {}
        self._merge, self._placement = merge, placement
        self._group, self._precision = group, jax.config.jax_default_matmul_precision
        """The caller may have set the precision in a context, which threads that compile don't share."""
        self._params, self.state = jax.tree.map(abstract, (params, state))
        """The shapes of the device state, and those of the weights."""
        self._compiled: dict[Program, jax.stages.Compiled] = {}
        self._under_way = dict[Program, None]()
        """Those that compile just now, the longest first."""
        self.is_sealed = False
        self.may_time = True
        """XLA may time its choices on the device. Not once the cache is allocated: timing would need the memory that is left,
        while requests run."""
        self._compiler: threading.Thread | None = None
        self._asked = dict[Program, int]()
        """Programs that launches asked for, and their place in the queue: URGENT or LATER. They compile in the background."""
        self._queue = queue.PriorityQueue[tuple[int, int, Program | None]]()
        """Place, number in order of asking, program; None ends the compiler."""
        self._numbers = itertools.count()
        self._news = threading.Event()
        self.failed = dict[Program, Exception]()
        """Programs that were asked for and could not be compiled."""
        self._stopping = False
        self._progress = CompilingProgress(shown=False)
        """The progress of the background compiler since it was last idle."""
        self.use(table)

    def __getitem__(self, program: Program) -> Callable[..., Any]:
        """The compiled program. It takes weights, state and what its kind needs; it returns the new State, or a NamedTuple with it
        as `state`.

        Compiles the program at its first use, unless this set is sealed.
        """
        if program not in self._compiled:
            if self.is_sealed:
                raise RuntimeError(f"program ({program}) was not compiled ahead; compiled: {', '.join(map(str, self._compiled))}")
            self._add(program)
        return self._compiled[program]

    def can_launch(self, program: Program) -> bool:
        """Whether the program is compiled, or may compile at its first use."""
        return program in self._compiled or not self.is_sealed

    def choose[Kind: Program](self, fitting: Iterable[Kind]) -> Kind:
        """The first of these programs, which come in order of size, that can be launched. After `seal` this never compiles.

        If a smaller one would fit, it begins to compile in the background, where a compiler was started.
        """
        programs = list(fitting)
        chosen = next(filter(self.can_launch, programs), programs[0])
        if chosen != programs[0]:
            self.ask_for(programs[0])
        return chosen

    def cycle(self, requests: int, tree: TreeShape) -> CycleProgram:
        """The smallest cycle for this many requests that can be launched, found anew when other programs are there."""
        known = self._cycles
        if (program := known.get((requests, tree))) is None:
            for each in self.table.own if len(self.table.own) > 1 else ():  # trees are compared at one batch size
                self.ask_for(next(self.table.cycles(requests, each)))
            program = known[requests, tree] = self.choose(self.table.cycles(requests, tree))
        return program

    def ask_for(self, program: Program, place: int = LATER) -> None:
        """Compiles the program in the background, unless it is compiled or was asked for before. Does not wait."""
        if self._compiler is not None and not self.can_launch(program) and place < self._asked.get(program, LATER + 1):
            if not self.is_compiling:
                self._progress = CompilingProgress(shown=True, has_bar=False)
            self._asked[program] = place
            self._queue.put((place, next(self._numbers), program))

    def require(self, program: Program, place: int = URGENT) -> None:
        """As `ask_for`, but starts the compiler if there is none. If URGENT, the program compiles before those that only make
        others faster."""
        if not self.can_launch(program):
            self.start_compiler()
            self.ask_for(program, place)

    def ask_for_more(self) -> None:
        """Compiles in the background, while requests run, what no start waits for. Starts the compiler if there is none."""
        self.start_compiler()
        for program in self.table.next_after_start():
            self.ask_for(program)

    def wait_for_news(self, seconds: float) -> None:
        """Waits until a program was compiled in the background since the last call, or failed, but no longer than this."""
        if self._news.wait(seconds):
            self._news.clear()

    @property
    def count(self) -> ProgramCount:
        """The number of compiled programs, that number once all requested ones are compiled, and how long that will take."""
        ready, missing = len(self._compiled), self._missing
        return ProgramCount(ready, ready + missing, self._progress.forecast.left(missing))

    def compile_all(self, programs: Iterable[Program], *, progress: bool = False, check: Callable[[], None] = lambda: None) -> None:
        """Compiles the programs that are not compiled yet, several at a time: XLA's compiler runs outside Python's lock.

        Raises:
            ProgramError: the first that can't be compiled.
            Exception: what `check` raises, which is called every second.
        """
        missing = [program for program in dict.fromkeys(programs) if program not in self._compiled]
        at_once = os.cpu_count() or 1
        pool = ThreadPoolExecutor(at_once)
        try:
            with removing_damaged(), CacheHits() as hits, CompilingProgress(at_once, total=len(missing), shown=progress) as shown:
                waiting, from_cache = {pool.submit(self._add_named, program, hits) for program in missing}, 0
                while waiting:
                    check()
                    ended, waiting = wait(waiting, LOOK_AGAIN, FIRST_COMPLETED)
                    for done in ended:
                        from_cache += done.result().from_cache
                        shown.forecast.add()
                    count = ProgramCount(len(missing) - len(waiting), len(missing), shown.forecast.left(len(waiting)))
                    shown.look(count, tuple(self._under_way), from_cache)
        finally:
            pool.shutdown(cancel_futures=True)  # after an exception the rest need not be compiled
        release_memory()

    def start_compiler(self) -> None:
        """Starts the thread that compiles what launches ask for. Each program is used as soon as it is ready.

        A program that can't be compiled is logged; a larger one stays in its place.
        """
        if self._compiler is None:
            self._compiler = threading.Thread(target=self._compile_asked, name="compiler", daemon=True)
            self._compiler.start()
            atexit.register(self._compiler.join)  # Python crashes if it exits while a thread is inside XLA
            atexit.register(self.stop)  # called first

    @property
    def is_compiling(self) -> bool:
        """Whether the background compiler is working."""
        return self._missing > 0

    @property
    def _missing(self) -> int:
        """The number of programs that were asked for and are neither compiled nor failed."""
        return sum(program not in self.compilations and program not in self.failed for program in list(self._asked))

    def wait(self) -> None:
        """Waits until the background compiler has nothing left to do."""
        self._queue.join()

    def stop(self) -> None:
        """Ends the compiler after its current program, without waiting for it; then nothing holds the weights for it."""
        if self._compiler is not None:
            self._stopping = True
            self._queue.put((STOP_NOW, next(self._numbers), None))
            atexit.unregister(self.stop)

    def _compile_asked(self) -> None:
        with CacheHits() as hits:
            while True:
                *_, program = self._queue.get()
                if program is None or self._stopping:
                    return
                if program in self.compilations or program in self.failed:  # it was asked for twice, the second time as urgent
                    self._queue.task_done()
                    continue
                try:
                    self._progress.look(self.count, [program])
                    self._add(program, hits)
                except Exception as error:
                    self.failed[program] = ProgramError.of(program, "could not be compiled", error)
                    logger.exception("could not compile (%s): a larger program stays in use, if there is one", program)
                finally:
                    self._progress.forecast.add()
                    if not self.is_compiling and program not in self.failed:
                        logger.info("all %d programs are ready, the last was (%s)", len(self._compiled), program)
                    self._queue.task_done()
                    self._news.set()
                    release_memory()

    def temporary_bytes(self, program: Program) -> int:
        """Memory that a compiled program takes while it runs, in addition to weights and state."""
        memory = self._compiled[program].memory_analysis()
        return memory.temp_size_in_bytes if memory else 0

    def most_temporaries(self) -> tuple[int, str]:
        """Bytes of temporaries of the compiled program that takes most, and the name of this program."""
        return max((self.temporary_bytes(program), str(program)) for program in self._compiled)

    def seal(self) -> None:
        """From now on no launch compiles."""
        self.is_sealed = True
        self.use(self.table)

    def _add_named(self, program: Program, hits: CacheHits) -> Compilation:
        try:
            return self._add(program, hits)
        except Exception as error:
            raise ProgramError.of(program, "could not be compiled", error) from error

    def _add(self, program: Program, hits: CacheHits | None = None) -> Compilation:
        started, hits_before = time.perf_counter(), hits.in_this_thread if hits else 0
        self._under_way[program] = None
        try:
            compiled = self._compile(program)
        finally:
            self._under_way.pop(program, None)  # two threads may have compiled it
        from_cache = hits is not None and hits.in_this_thread > hits_before
        done = Compilation(time.perf_counter() - started, from_cache)
        logger.debug("%s %s in %.1f s", "found" if from_cache else "compiled", program, done.seconds)
        self._compiled[program], self.compilations[program] = compiled, done
        self.use(self.table)
        return done

    def use(self, table: ProgramTable) -> None:
        """Launches choose from this table's programs."""
        self.table = table
        self.ready = table.ready(self.can_launch)
        """What launches may use; published anew when it changes, so that no step has to ask."""
        self._cycles = dict[tuple[int, TreeShape], CycleProgram]()
        """The choice for each number of requests and tree, as long as it stands."""

    def _compile(self, program: Program) -> jax.stages.Compiled:
        timed = self.may_time
        with self._group.compiling(program, timed=timed), jax.default_matmul_precision(self._precision):
            return self.lower(program).compile(compiler_options=self._placement.compiler_options(timed=timed))

    def identity(self, program: Program) -> Hashable:
        """Everything that the compiled program depends on: equal identities, even in another Programs, mean equal programs."""
        leaves, structure = jax.tree.flatten((self._params, self.state))
        shapes = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        return program, self._merge, self._placement, structure, shapes, repr(jax.config.values)

    def digest(self, params: dict) -> str:
        """Of the models and options, and of the weights that are vectors, which every device has whole (the norms of two models of
        one shape differ): equal in processes that run one engine together."""
        leaves, structure = jax.tree.flatten((self._params, self.state))
        shapes = [f"{leaf.dtype} {leaf.shape}" for leaf in leaves]
        models, device = ADDRESS.sub("", repr(self._merge)), self._placement.device.device_kind
        found = hashlib.sha256(repr((models, device, structure, shapes)).encode())
        for array in jax.tree.leaves(params):
            if array.ndim == 1 and array.is_fully_replicated:
                found.update(np.asarray(array.addressable_data(0)).tobytes())
        return found.hexdigest()

    def lower(self, program: Program, platform: str | None = None) -> jax.stages.Lowered:
        """The program, ready to be compiled for JAX's default platform or another one."""
        function, arguments = self._function(program), (self._params, self.state, *self.inputs(program))
        with lowered_for(platform or ("cuda" if jax.default_backend() == "gpu" else "cpu")):
            if self.traces is not None:
                function = self.traces.get(repr(program), function, arguments)
            traced = jax.jit(function, donate_argnums=1).trace(*arguments)  # donated: the state is updated in place
        return traced.lower(lowering_platforms=(platform,) if platform else None)

    def inputs(self, program: Program) -> tuple[Any, ...]:
        """The shapes of what the program takes in addition to weights and state."""
        return program.inputs(self.state, self._output_of)

    def _output_of(self, program: Program) -> Any:
        return jax.eval_shape(self._function(program), self._params, self.state, *self.inputs(program))

    def _function(self, program: Program) -> Callable[..., Any]:
        def function(params: dict, state: State, *inputs: Any) -> Any:
            return program.run(self._merge(params), state, *inputs)

        function.__name__ = type(program).__name__  # as profiles show it
        return self._placement.program(function, self._params)


def lower_priority() -> None:
    """Lets XLA's compiling threads give way to others (Linux), for the life of the process.

    They never hold Python's lock. The thread that traces does, and keeps its priority, so no request waits for a slow thread.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            if name.read_text().startswith(COMPILING_THREADS):
                os.setpriority(os.PRIO_PROCESS, int(name.parent.name), 10)


def release_memory() -> None:
    """Returns memory freed by compiling to the system. glibc would keep it: 0.2 GB after a cycle."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)


def abstract(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
