"""The compiled programs: a short, listed set, each compiled ahead of time and called by name, so none can retrace."""

import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.engine.program_cache import CacheHits, StoredTraces
from jaxspec.spec.cycle import CycleOptions, cycle
from jaxspec.spec.extend import catch_up
from jaxspec.spec.prefill import Chunk, prefill
from jaxspec.spec.state import Admission, Models, State, admit, neutral_settings

logger = logging.getLogger(__name__)

SHORTEST_TABLE = 256
"""Tokens; a page table for fewer is not worth a program of its own."""
INTERVAL = 30.0
"""Seconds between two lines."""
BAR = "{desc}: {n_fmt} of {total_fmt} programs |{bar}| {elapsed} gone, about {remaining} left{postfix}"


# Dataclasses, not tuples: a tuple equals any other one with the same numbers, and programs are found by name.


@dataclass(frozen=True)
class CycleProgram:
    """One cycle of `batch` sequences whose page tables are `pages` wide."""

    batch: int
    pages: int
    spec: SpecConfig

    def __str__(self) -> str:
        return f"cycle {self.spec}, batch {self.batch}, {self.pages} pages"


@dataclass(frozen=True)
class PrefillProgram:
    """One chunk of one prompt."""

    chunk: int
    pages: int

    def __str__(self) -> str:
        return f"prefill {self.chunk} tokens, {self.pages} pages"


@dataclass(frozen=True)
class CatchUpProgram:
    """Extends the head by the slots that it lags behind after plain cycles."""

    batch: int
    pages: int

    def __str__(self) -> str:
        return f"catch up, batch {self.batch}, {self.pages} pages"


@dataclass(frozen=True)
class AdmitProgram:
    """Sets up the state row of one request."""

    def __str__(self) -> str:
        return "admit"


Program = CycleProgram | PrefillProgram | CatchUpProgram | AdmitProgram


class Buckets(NamedTuple):
    """The sizes that programs are compiled for; a step takes the smallest that fits."""

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig, max_pages: int, *, narrow_tables: bool) -> "Buckets":
        """narrow_tables: also compile for short page tables, which pays where attention reads the whole table (the XLA reference).

        In:  max_running_requests 20, prefill_chunk 256, page_size 16, max_pages 64
        Out: batches (1, 2, 3, 4, 6, 8, 12, 16, 20), chunks (16, 64, 128, 256), pages (16, 64)
        """
        most = config.max_running_requests
        powers = [2**power for power in range(most.bit_length())]
        batches = {size for power in powers for size in (power, power + power // 2) if size < most} | {most}
        chunks = {max(1, config.prefill_chunk // share) for share in (1, 2, 4, 16)}  # a half: what one of two prompts gets
        narrow = max(-(-max_pages // 4), -(-SHORTEST_TABLE // config.page_size))
        pages = {min(narrow, max_pages), max_pages} if narrow_tables else {max_pages}
        return cls(*(tuple(sorted(sizes)) for sizes in (batches, chunks, pages)))

    @property
    def few_batches(self) -> tuple[int, ...]:
        """Powers of two and the largest, for cycles that only single requests ask for: fewer programs to compile.

        In:  batches (1, 2, 3, 4, 6, 8, 12, 16, 20)
        Out: (1, 2, 4, 8, 16, 20)
        """
        return tuple(size for size in self.batches if size.bit_count() == 1 or size == self.batches[-1])


def smallest(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest bucket that holds `needed`."""
    return next(size for size in sizes if size >= needed)


class Compilation(NamedTuple):
    """How a program came to be."""

    seconds: float
    """Other programs may have been compiled at the same time."""
    from_cache: bool
    """JAX had it in its persistent cache. (Not known of a program that was compiled when it was first needed: False.)"""


class Programs:
    """Compiled programs by name. After `seal`, asking for one that was not compiled is an error instead of a stall."""

    def __init__(self, merge: Callable[[dict], Models], params: dict, state: State, options: CycleOptions):
        self.traces: StoredTraces | None = None
        """Where traced programs are kept, if they are: a process with the same settings need not trace them again."""
        self.compilations: dict[Program, Compilation] = {}
        self._merge, self._params, self._options = merge, params, options
        self._state = jax.tree.map(abstract, state)
        self._compiled: dict[Program, jax.stages.Compiled] = {}
        self._sealed = False

    def __getitem__(self, program: Program) -> Callable[..., Any]:
        """The compiled program: it takes weights, state and what its kind needs, and returns a Step or, without a report, a State.

        Compiles it first if nobody asked for it before.
        """
        if program not in self._compiled:
            if self._sealed:
                raise RuntimeError(f"program ({program}) was not compiled ahead; compiled: {', '.join(map(str, self._compiled))}")
            self._add(program)
        return self._compiled[program]

    def compile_all(self, programs: Iterable[Program], *, progress: bool = False) -> None:
        """Compiles the programs that are not compiled yet, several at a time: XLA's compiler runs outside Python's lock."""
        wanted = [program for program in programs if program not in self._compiled]
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            with CacheHits() as hits, CompilingProgress(len(wanted), shown=progress) as shown:
                for done in as_completed([pool.submit(self._add, program, hits) for program in wanted]):
                    shown.add(from_cache=done.result().from_cache)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure, or Ctrl-C, the rest need not be compiled

    def temporary_bytes(self, program: Program) -> int:
        """Memory that a compiled program takes while it runs, beside weights and state."""
        memory = self._compiled[program].memory_analysis()
        return memory.temp_size_in_bytes if memory else 0

    def seal(self) -> None:
        """From now on nothing compiles."""
        self._sealed = True

    def _add(self, program: Program, hits: CacheHits | None = None) -> Compilation:
        started, hits_before = time.perf_counter(), hits.in_this_thread if hits else 0
        compiled = self._compile(program)
        from_cache = hits is not None and hits.in_this_thread > hits_before
        done = Compilation(time.perf_counter() - started, from_cache)
        logger.debug("%s %s in %.1f s", "found" if from_cache else "compiled", program, done.seconds)
        self._compiled[program], self.compilations[program] = compiled, done
        return done

    def _compile(self, program: Program) -> jax.stages.Compiled:
        return self.lower(program).compile()

    def identity(self, program: Program) -> Hashable:
        """All that decides the compiled program: where it is equal, also in another Programs, the compiled program is the same."""
        leaves, structure = jax.tree.flatten((self._params, self._state))
        shapes = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        return program, self._merge, self._options, structure, shapes, repr(jax.config.values)

    def lower(self, program: Program, platform: str | None = None) -> jax.stages.Lowered:
        """The program, ready to be compiled for JAX's default platform or another one."""
        function, others = self._define(program)
        arguments = (self._params, self._state, *others)
        if self.traces is not None:
            function = self.traces.get(repr(program), function, arguments)
        traced = jax.jit(function, donate_argnums=1).trace(*arguments)  # donated: the state is updated in place
        return traced.lower(lowering_platforms=(platform,) if platform else None)

    def _define(self, program: Program) -> tuple[Callable[..., Any], tuple]:
        """The function to compile, and the shapes of what it takes beside weights and state."""
        match program:
            case CycleProgram(batch, pages, spec):

                def cycle_program(params, state, rows, page_table):
                    return cycle(self._merge(params), state, rows, page_table, spec=spec, options=self._options)

                return cycle_program, (int32(batch), int32(batch, pages))
            case CatchUpProgram(batch, pages):

                def catch_up_program(params, state, rows, page_table):
                    return catch_up(self._merge(params), state, rows, page_table, window=self._options.window)

                return catch_up_program, (int32(batch), int32(batch, pages))
            case PrefillProgram(width, pages):

                def prefill_program(params, state, chunk):
                    return prefill(self._merge(params), state, chunk, options=self._options)

                one = int32(1)
                is_last: Any = jax.ShapeDtypeStruct((1,), jnp.bool_)
                return prefill_program, (Chunk(one, int32(1, pages), int32(1, width), one, one, one, is_last),)
            case AdmitProgram():

                def admit_program(_params, state, admission):
                    return admit(state, admission)

                return admit_program, (self._admission(),)

    def _admission(self) -> Admission:
        """The shapes of one request's Admission."""
        settings = jax.eval_shape(lambda: neutral_settings(1))
        bias: Any = jax.ShapeDtypeStruct((1, self._state.bias.shape[1]), jnp.float32)
        return Admission(int32(1), int32(1, self._state.history.shape[1]), int32(1), settings, bias)


def int32(*shape: int) -> Any:
    """The shape of whole numbers, standing for an array that is not there yet."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


class CompilingProgress:
    """To be told of every program that is ready. Says nothing unless `shown`."""

    def __init__(self, total: int, *, shown: bool, clock: Callable[[], float] = time.monotonic):
        on_terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="compiling", bar_format=BAR, leave=False, disable=not on_terminal)
        self._logs, self._total, self._clock = shown and not on_terminal, total, clock
        self._ready = self._from_cache = 0
        self._started = self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, *, from_cache: bool) -> None:
        """One more program is ready."""
        self._ready += 1
        self._from_cache += from_cache
        self._bar.set_postfix_str(f"{self._from_cache} from the cache", refresh=False)
        self._bar.update()
        now, left = self._clock(), self._total - self._ready
        if self._logs and left and now - self._last_line >= INTERVAL:
            self._last_line = now
            seconds = (now - self._started) / self._ready * left
            logger.info("%d of %d programs are ready, about %.0f s left", self._ready, self._total, seconds)
