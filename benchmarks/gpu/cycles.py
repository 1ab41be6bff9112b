"""The programs that the engine runs, with random weights: cycles and prefill; and how long compiling one takes."""

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.config import ATTENTION_KERNELS, PLAIN, TreeShape
from jaxspec.decoding.cycle import cycle
from jaxspec.decoding.prefill import Chunk, prefill
from jaxspec.decoding.state import State
from jaxspec.planner import estimate
from jaxspec.planner.gpus import GPUS, Gpu
from jaxspec.planner.time_model import time_model

from .arrays import Batch, batch_bytes, batch_shapes, make_batch
from .kernels import Cases
from .lab import Lab, Skip
from .programs import Built, build
from .sizes import ASSUMED_ACCEPT_LENGTHS

WAYS = ("nothing stored", "autotuned before", "from the cache")


def build_cycle(lab: Lab, tree: TreeShape, batch: int, context: int, attention: str | None = None) -> Built:
    """The program that engine.programs.CycleProgram names, for these sizes; `attention` as EngineConfig.attention_kernel."""
    merge = lab.merger(attention)

    def cycle_program(params, state, rows, page_table):
        return cycle(merge(params), state, rows, page_table, tree=tree)

    layers = lab.size.target.num_layers
    name = f"cycle {tree.name} {batch} {context} {attention} {layers} {lab.size.target.hidden_size}"
    return build(lab, cycle_program, (lab.parameter_shapes, *batch_shapes(lab, batch, context)), name=name, layers=layers)


def goals(lab: Lab, run: str) -> Cases:
    """Whole cycles at batch 1 and the context that the goals are set for."""
    return cells(lab, lab.size.trees, [(1, lab.size.goal_context)])


def flags(lab: Lab, run: str) -> Cases:
    """The first two trees with the settings of XLA that this process was started with."""
    for case, measure in cells(lab, lab.size.trees[:2], [(1, lab.size.goal_context)]):
        yield {"flags": run, **case}, measure


def grid(lab: Lab, run: str) -> Cases:
    """Whole cycles at all batch sizes and contexts."""
    sizes = [(batch, context) for batch in lab.size.batches for context in lab.size.contexts]
    return cells(lab, lab.size.trees, sizes)


def by_attention(lab: Lab, run: str) -> Cases:
    """Cycles with each attention kernel, at batch 1: whole cycles decide which one is the default."""
    contexts = sorted({lab.size.goal_context, lab.size.contexts[-1]})
    for kernel in ATTENTION_KERNELS:
        for case, measure in cells(lab, lab.size.trees[:2], [(1, context) for context in contexts], kernel):
            yield {"attention": kernel, **case}, measure


def cells(lab: Lab, trees: Sequence[TreeShape], sizes: Sequence[tuple[int, int]], attention: str | None = None) -> Cases:
    """Each is compiled alone, when its turn comes: one that can't be compiled in time costs no other."""
    for batch, context in sizes:
        for tree in trees:
            case = {"tree": tree.name, "batch": batch, "context": context}
            yield case, partial(time_cycle, lab, tree, batch, context, attention)


def time_cycle(lab: Lab, tree: TreeShape, batch: int, context: int, attention: str | None = None) -> dict:
    """Milliseconds per cycle, and the least that reading its bytes and its arithmetic take at the measured peaks."""
    if attention not in (None, "reference") and not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    least = estimate.cycle_cost(lab.pair, tree, batch, context)
    moved = sum(least.moved.values())
    logits = estimate.LOGIT_BYTES * batch * tree.num_draft_tokens * lab.size.target.vocab_size
    lab.check_room(batch_bytes(lab, batch, context) + logits, f"the cache of {batch} x {context} tokens")
    built = build_cycle(lab, tree, batch, context, attention)
    made = make_batch(lab, batch, context)
    try:
        jax.block_until_ready(lab.params)
        started = time.perf_counter()
        made.state = built.program(lab.params, made.state, made.rows, made.page_table).state
        jax.block_until_ready(made.state.sequences.length)
        first = time.perf_counter() - started
        milliseconds, drift = time_steps(lab, made, lambda state: built.program(lab.params, state, made.rows, made.page_table))
    finally:
        made.delete()
    seconds = median(milliseconds) / 1e3
    accept_lengths = (1.0,) if tree == PLAIN else ASSUMED_ACCEPT_LENGTHS
    return {
        "milliseconds": milliseconds,
        "bytes": moved,
        "operations": least.operations,
        "model_milliseconds": model(lab, tree, batch, context),
        "byte_roofline_ms": 1e3 * moved / lab.bandwidth,
        "arithmetic_roofline_ms": 1e3 * least.operations / lab.arithmetic,
        "share_of_byte_roofline": moved / lab.bandwidth / seconds,
        # Random weights accept no draft, so the accept lengths of trees are assumptions and no measurements.
        "tokens_per_second_at_assumed_accept_length": {f"{length:g}": batch * length / seconds for length in accept_lengths},
        "context_grew_by": drift,
        "first_run_seconds": first,
        **built.columns,
    }


def model(lab: Lab, tree: TreeShape, batch: int, context: int) -> float | None:
    """The time model's milliseconds at the measured bandwidth; None for a GPU that it does not know."""
    gpu = known_gpu(lab.device.device_kind)
    if gpu is None:
        return None
    return sum(time_model(lab.pair, tree, batch, context, gpu, copy_speed=lab.bandwidth).values())


def known_gpu(kind: str) -> Gpu | None:
    """The GPU with this name, or one with the same chip: the time model takes the measured bandwidth, not the data sheet's.

    In: "NVIDIA H100 80GB HBM3"  Out: GPUS["h100"]
    """
    chips = {name.replace("rtx-", "rtx ").split("-")[0]: gpu for name, gpu in reversed(GPUS.items())}
    return next((gpu for chip, gpu in chips.items() if re.search(rf"\b{chip}\b", kind.lower())), None)


def time_steps(lab: Lab, made: Batch, step: Callable[[State], Any]) -> tuple[list[float], int]:
    """Milliseconds per step, each feeding the next, and by how much the context grew at most before it was put back."""

    def call():
        result = step(made.state)
        made.state = result.state
        return result.report

    spread = lab.time(call, prepare=made.put_back)
    return spread.values, int(made.state.sequences.length.max()) - made.context


def prefills(lab: Lab, run: str) -> Cases:
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
        with lab.compile_phase():
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


def compiling(lab: Lab, run: str) -> Cases:
    """One program three ways; the last two need what the ones before have stored, so they come in this order."""
    scratch = tempfile.TemporaryDirectory()
    for way in WAYS:
        yield {"program": f"cycle {lab.size.trees[1].name}, batch 1", "way": way}, partial(time_compiling, lab, way, scratch)


def time_compiling(lab: Lab, way: str, scratch: tempfile.TemporaryDirectory) -> dict:
    """Seconds to trace and lower, and to compile or load, with an empty cache that this part has to itself.

    A process pays for the start of the compiler with its first compilation, so a small one comes before.
    """
    stored = Path(scratch.name)
    if way == "autotuned before":  # only the results of autotuning are left
        for file in stored.glob("*-cache"):
            file.unlink()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(stored))
    compilation_cache.reset_cache()  # JAX asks only once where the cache is
    jax.clear_caches()
    jax.jit(lambda x: x + 1).lower(jnp.zeros(len(way))).compile()
    try:
        return build_cycle(lab, lab.size.trees[1], 1, lab.size.goal_context).columns
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
