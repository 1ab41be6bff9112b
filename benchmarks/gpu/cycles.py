"""The programs that the engine runs, with random weights: cycles and prefill; and how long compiling one takes."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.config import ATTENTION_KERNELS, PLAIN, SpecConfig
from jaxspec.engine.program_cache import CacheHits
from jaxspec.planner import estimate
from jaxspec.spec.cycle import cycle
from jaxspec.spec.prefill import Chunk, prefill
from jaxspec.spec.state import State

from .arrays import Batch, batch_bytes, batch_shapes, make_batch
from .kernels import Cases
from .lab import Lab, Skip, Together
from .sizes import ASSUMED_ACCEPT_LENGTHS


def lower_cycle(lab: Lab, spec: SpecConfig, batch: int, context: int, attention: str | None = None) -> jax.stages.Lowered:
    """The program that engine.programs.CycleProgram names, for these sizes; `attention` as EngineConfig.attention_kernel."""
    merge = lab.merger(attention)

    def cycle_program(params, state, rows, page_table):
        return cycle(merge(params), state, rows, page_table, spec=spec)

    return jax.jit(cycle_program, donate_argnums=1).lower(lab.parameter_shapes, *batch_shapes(lab, batch, context))


def goals(lab: Lab) -> Cases:
    """Whole cycles at batch 1 and the context that the goals are set for."""
    return cells(lab, lab.size.trees, [(1, lab.size.goal_context)])


def grid(lab: Lab) -> Cases:
    """Whole cycles at all batch sizes and contexts."""
    return cells(lab, lab.size.trees, [(batch, context) for batch in lab.size.batches for context in lab.size.contexts])


def by_attention(lab: Lab) -> Cases:
    """Cycles with each attention kernel, at batch 1: whole cycles decide which one is the default."""
    contexts = sorted({lab.size.goal_context, lab.size.contexts[-1]})
    for kernel in ATTENTION_KERNELS:
        yield from cells(lab, lab.size.trees[:2], [(1, context) for context in contexts], kernel)


def cells(lab: Lab, trees: Sequence[SpecConfig], sizes: Sequence[tuple[int, int]], attention: str | None = None) -> Cases:
    for batch, context in sizes:
        programs = Together({spec: partial(lower_cycle, lab, spec, batch, context, attention) for spec in trees})
        for spec in trees:
            case = {"tree": spec.name, "batch": batch, "context": context}
            named = case if attention is None else {"attention": attention, **case}
            yield named, partial(time_cycle, lab, programs, spec, batch, context, attention)


def time_cycle(
    lab: Lab, programs: Together[SpecConfig], spec: SpecConfig, batch: int, context: int, attention: str | None = None
) -> dict:
    """Milliseconds per cycle, and the least that reading its bytes and its arithmetic take at the measured peaks."""
    if attention not in (None, "reference") and not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    least = estimate.cycle_cost(lab.pair, spec, batch, context)
    moved = sum(least.moved.values())
    logits = estimate.LOGIT_BYTES * batch * spec.num_draft_tokens * lab.size.target.vocab_size
    lab.check_room(batch_bytes(lab, batch, context) + logits, f"the cache of {batch} x {context} tokens")
    program = programs[spec]
    made = make_batch(lab, batch, context)
    try:
        milliseconds, drift = time_steps(lab, made, lambda state: program(lab.params, state, made.rows, made.page_table))
    finally:
        made.delete()
    seconds = median(milliseconds) / 1e3
    accept_lengths = (1.0,) if spec == PLAIN else ASSUMED_ACCEPT_LENGTHS
    return {
        "milliseconds": milliseconds,
        "bytes": moved,
        "operations": least.operations,
        "byte_roofline_ms": 1e3 * moved / lab.bandwidth,
        "arithmetic_roofline_ms": 1e3 * least.operations / lab.arithmetic,
        "share_of_byte_roofline": moved / lab.bandwidth / seconds,
        # Random weights accept no draft, so the accept lengths of trees are assumptions and no measurements.
        "tokens_per_second_at_assumed_accept_length": {f"{length:g}": batch * length / seconds for length in accept_lengths},
        "context_grew_by": drift,
        "temporary_bytes": temporaries(program),
    }


def time_steps(lab: Lab, made: Batch, step: Callable[[State], Any]) -> tuple[list[float], int]:
    """Milliseconds per step, each feeding the next, and by how much the context grew at most before it was put back."""

    def call():
        result = step(made.state)
        made.state = result.state
        return result.report

    spread = lab.time(call, prepare=made.put_back)
    return spread.values, int(made.state.sequences.length.max()) - made.context


def temporaries(program: jax.stages.Compiled) -> int | None:
    """Bytes of the program's temporaries; None if the backend does not report them."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes if memory else None


def prefills(lab: Lab) -> Cases:
    """One chunk of one prompt, at its beginning and behind a long one."""
    for first_slot in lab.size.prefill_contexts:
        for width in lab.size.prefill_chunks:
            yield {"chunk": width, "context": first_slot}, partial(time_prefill, lab, width, first_slot)


def time_prefill(lab: Lab, width: int, first_slot: int) -> dict:
    """Milliseconds per chunk and tokens per second, and the matrix products' share of the measured arithmetic peak."""
    made = make_batch(lab, 1, first_slot + width)
    one = jnp.ones(1, jnp.int32)
    tokens = jax.random.randint(jax.random.key(5), (1, width), 0, lab.size.target.vocab_size, jnp.int32)
    first = one * first_slot
    chunk = Chunk(made.rows, made.page_table, tokens, first, one * width, first, is_last=jnp.ones(1, bool))

    def prefill_program(params, state, chunk):
        return prefill(lab.merge(params), state, chunk)

    try:
        program = jax.jit(prefill_program, donate_argnums=1).lower(lab.params, made.state, chunk).compile()
        milliseconds, _ = time_steps(lab, made, lambda state: program(lab.params, state, chunk))
    finally:
        made.delete()
    seconds = median(milliseconds) / 1e3
    models = (lab.pair.target, lab.pair.head)
    weights = sum(model.weights.layers + model.weights.fusion for model in models if model) / lab.dtype.itemsize
    return {
        "milliseconds": milliseconds,
        "tokens_per_second": width / seconds,
        "share_of_arithmetic_peak": 2 * weights * width / lab.arithmetic / seconds,
    }


def compiling(lab: Lab) -> Cases:
    """One program three ways; the last two need JAX's cache on the disk, so they come in this order."""
    for way in ("no cache", "stored", "from the cache"):
        yield {"program": f"cycle {lab.size.staged_trees[0]}, batch 1", "way": way}, partial(time_compiling, lab, way)


def time_compiling(lab: Lab, way: str) -> dict:
    """Seconds to trace and lower, and to compile or load. The first compilation of a process also starts up the compiler."""
    jax.config.update("jax_enable_compilation_cache", way != "no cache")
    compilation_cache.reset_cache()  # JAX asks only once whether the cache is on
    jax.clear_caches()
    try:
        with CacheHits() as hits:
            started = time.perf_counter()
            lowered = lower_cycle(lab, lab.size.staged_trees[0], 1, lab.size.goal_context)
            traced = time.perf_counter()
            lowered.compile()
            return {
                "lower_seconds": traced - started,
                "compile_seconds": time.perf_counter() - traced,
                "found_in_cache": hits.in_this_thread > 0,
            }
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
