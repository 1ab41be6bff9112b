"""The compiled programs: a short, listed set, each compiled ahead of time and called by name, so none can retrace."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.sampling import SamplingKind
from jaxspec.spec.cycle import Models, Step, cycle
from jaxspec.spec.prefill import Chunk, prefill
from jaxspec.spec.state import MAX_STOP_TOKENS, Caches, Sequences

logger = logging.getLogger(__name__)

SHORTEST_TABLE = 256
"""Tokens; a page table for fewer is not worth a program of its own."""


class CycleProgram(NamedTuple):
    """One cycle of `batch` sequences whose page tables are `pages` wide."""

    batch: int
    pages: int
    spec: SpecConfig
    kind: SamplingKind

    def __str__(self) -> str:
        return f"cycle {self.spec} {self.kind.value}, batch {self.batch}, {self.pages} pages"


class PrefillProgram(NamedTuple):
    """One chunk of one prompt; it serves greedy and sampled requests alike."""

    chunk: int
    pages: int

    def __str__(self) -> str:
        return f"prefill {self.chunk} tokens, {self.pages} pages"


Program = CycleProgram | PrefillProgram


class Buckets(NamedTuple):
    """The sizes that programs are compiled for; a step takes the smallest that fits."""

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig, max_pages: int, *, narrow_tables: bool) -> "Buckets":
        """narrow_tables: also compile for short page tables, which pays where attention reads the whole table (the XLA reference).

        In:  max_running_requests 12, prefill_chunk 256, page_size 16, max_pages 64
        Out: batches (1, 2, 4, 8, 12), chunks (16, 64, 256), pages (16, 64)
        """
        most = config.max_running_requests
        batches = {size for size in (2**power for power in range(most.bit_length())) if size < most} | {most}
        chunks = {max(1, config.prefill_chunk // 4**i) for i in range(3)}
        narrow = max(-(-max_pages // 4), -(-SHORTEST_TABLE // config.page_size))
        pages = {min(narrow, max_pages), max_pages} if narrow_tables else {max_pages}
        return cls(*(tuple(sorted(sizes)) for sizes in (batches, chunks, pages)))


def smallest(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest bucket that holds `needed`."""
    return next(size for size in sizes if size >= needed)


class Programs:
    """Compiled programs by name. After `seal`, asking for one that was not compiled is an error instead of a stall."""

    def __init__(self, merge: Callable[[dict], Models], params: dict, caches: Caches, sequences: Sequences):
        self._merge, self._params = merge, params
        self._caches, self._sequences = jax.tree.map(abstract, (caches, sequences))
        self._compiled: dict[Program, jax.stages.Compiled] = {}
        self._sealed = False

    def __getitem__(self, program: Program) -> Callable[..., Step]:
        """The compiled program; compiles it first if nobody asked for it before."""
        if program not in self._compiled:
            if self._sealed:
                raise RuntimeError(f"program ({program}) was not compiled ahead; compiled: {', '.join(map(str, self._compiled))}")
            started = time.perf_counter()
            self._compiled[program] = self._compile(program)
            logger.debug("compiled %s in %.1f s", program, time.perf_counter() - started)
        return self._compiled[program]

    def compile_all(self, programs: Iterable[Program], *, progress: bool = False) -> None:
        """Compiles the programs that are not compiled yet, several at a time: XLA's compiler runs outside Python's lock."""
        wanted = list(programs)
        with ThreadPoolExecutor(os.cpu_count()) as pool, tqdm(total=len(wanted), desc="compiling", disable=not progress) as bar:
            for done in as_completed(pool.submit(self.__getitem__, program) for program in wanted):
                done.result()
                bar.update()

    def seal(self) -> None:
        """From now on nothing compiles."""
        self._sealed = True

    def _compile(self, program: Program) -> jax.stages.Compiled:
        function, arguments = self._cycle(program) if isinstance(program, CycleProgram) else self._prefill(program)
        jitted = jax.jit(function, donate_argnums=(1, 2))  # caches and state are updated in place
        return jitted.lower(self._params, self._caches, self._sequences, *arguments).compile()

    def _cycle(self, program: CycleProgram) -> tuple[Callable[..., Step], tuple]:
        """The function to compile, and the shapes of what it takes beside weights, caches and state."""

        def cycle_program(params, caches, sequences, rows, page_table):
            return cycle(self._merge(params), caches, sequences, rows, page_table, spec=program.spec, kind=program.kind)

        return cycle_program, (int32(program.batch), int32(program.batch, program.pages))

    def _prefill(self, program: PrefillProgram) -> tuple[Callable[..., Step], tuple]:
        """As `_cycle`."""

        def prefill_program(params, caches, sequences, chunk):
            return prefill(self._merge(params), caches, sequences, chunk, kind=SamplingKind.TEMPERATURE)

        fields: dict[str, Any] = {
            "row": int32(1),
            "page_table": int32(1, program.pages),
            "tokens": int32(1, program.chunk),
            "first_slot": int32(1),
            "size": int32(1),
            "is_last": jax.ShapeDtypeStruct((1,), jnp.bool_),
            "temperature": jax.ShapeDtypeStruct((1,), jnp.float32),
            "seed": jax.ShapeDtypeStruct((1, 2), jnp.uint32),
            "max_tokens": int32(1),
            "stop_tokens": int32(1, MAX_STOP_TOKENS),
        }
        return prefill_program, (Chunk(**fields),)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
