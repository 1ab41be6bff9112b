"""The programs that the engine runs, with random weights: cycles of each kind of sampling, and prefill."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from statistics import median
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import PLAIN, QUANTIZATIONS, TreeShape
from jaxspec.decoding.cycle import cycle
from jaxspec.decoding.prefill import Chunk, prefill
from jaxspec.decoding.settings import SamplingKind
from jaxspec.decoding.state import State
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.planner import estimate
from jaxspec.planner.gpus import GPUS, Gpu
from jaxspec.planner.time_model import time_model

from .arrays import SAMPLING, Batch, batch_bytes, batch_shapes, make_batch
from .lab import Cases, Lab, Skip
from .parts import FLAGS
from .programs import Built, Options, build
from .sizes import ASSUMED_ACCEPT_LENGTHS

Cell = tuple[dict[str, Any], Callable[..., dict[str, Any]]]
GREEDY = ("greedy",)
CHOICES = {
    "matmul skinny": Kernels(matmul="skinny"),
    "attention mosaic": Kernels(attention="mosaic"),
    "as it is": DEFAULT_KERNELS,
}
"""What could become the default: only whole cycles decide."""


def build_cycle(lab: Lab, tree: TreeShape, batch: int, context: int, kernels: Kernels, options: Options) -> Built:
    """The program that engine.programs.CycleProgram names, for these sizes."""
    merge = lab.merger(kernels)

    def cycle_program(params, state, rows, page_table):
        return cycle(merge(params), state, rows, page_table, tree=tree)

    layers = lab.size.target.num_layers
    name = f"cycle {tree.name} {batch} {context} {kernels} {lab.size.target}"
    arguments = (lab.parameter_shapes, *batch_shapes(lab, batch, context))
    return build(lab, cycle_program, arguments, name=name, layers=layers, options=options)


def goals(lab: Lab) -> Cases:
    """Whole cycles at batch 1 and the context that the goals are set for. All kinds of sampling are in one program."""
    return cells(lab, lab.size.trees[: lab.size.goal_trees], list(SAMPLING), [(1, lab.size.goal_context)])


def flags(lab: Lab) -> Cases:
    """The first tree with other settings of XLA; only one of them where they change nothing."""
    for name, options in islice(FLAGS.items(), None if lab.on_gpu else 1):
        for case, measure in cells(lab, lab.size.trees[1:2], GREEDY, [(1, lab.size.goal_context)]):
            yield {"flags": name, **case}, partial(measure, options=options)


def choices(lab: Lab) -> Cases:
    """Cycles with other kernels, at batch 1; with the defaults too where `goals` doesn't measure them."""
    for context in sorted({lab.size.goal_context, lab.size.contexts[-1]}):
        for name, kernels in CHOICES.items():
            if kernels != DEFAULT_KERNELS or context != lab.size.goal_context:
                for case, measure in cells(lab, lab.size.trees[:2], ("greedy", "top_p"), [(1, context)]):
                    yield {"kernels": name, **case}, partial(measure, kernels=kernels)


def weights(lab: Lab) -> Cases:
    """Greedy cycles with quantised matrices, at batch 1; only one kind where figures mean nothing."""
    for kind in QUANTIZATIONS if lab.on_gpu else QUANTIZATIONS[:1]:
        stored = lab.with_weights(kind)
        for case, measure in cells(stored, lab.size.trees[:2], GREEDY, [(1, lab.size.goal_context)]):
            yield {"weights": kind, **case}, measure


def grid(lab: Lab) -> Cases:
    """Whole greedy cycles at all batch sizes and contexts."""
    return cells(lab, lab.size.trees, GREEDY, list(product(lab.size.batches, lab.size.contexts)))


def cells(lab: Lab, trees: Sequence[TreeShape], kinds: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Iterator[Cell]:
    """Each program is compiled alone, when its turn comes: one that can't be compiled in time costs no other."""
    for (batch, context), tree, sampling in product(sizes, trees, kinds):
        case = {"tree": tree.name, "sampling": sampling, "batch": batch, "context": context}
        yield case, partial(time_cycle, lab, tree, sampling, batch, context)


def time_cycle(
    lab: Lab,
    tree: TreeShape,
    sampling: str,
    batch: int,
    context: int,
    *,
    kernels: Kernels = DEFAULT_KERNELS,
    options: Options = MappingProxyType({}),
) -> dict[str, Any]:
    """Milliseconds per cycle, and the least that reading its bytes and its arithmetic take at the measured peaks."""
    if kernels.attention not in (None, "reference") and not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    least = estimate.cycle_cost(lab.pair, tree, batch, context)
    moved = sum(least.moved.values())
    logits = estimate.LOGIT_BYTES * batch * tree.num_draft_tokens * lab.size.target.vocab_size
    lab.check_room(batch_bytes(lab, batch, context) + logits, f"the cache of {batch} x {context} tokens")
    key = (tree, batch, context, kernels, tuple(options.items()))
    built = lab.newest(key, lambda: build_cycle(lab, tree, batch, context, kernels, options))
    made = make_batch(lab, batch, context, sampling)
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
        "model_milliseconds": model(lab, tree, sampling, batch, context),
        "byte_roofline_ms": 1e3 * moved / lab.bandwidth,
        "arithmetic_roofline_ms": 1e3 * least.operations / lab.arithmetic,
        "share_of_byte_roofline": moved / lab.bandwidth / seconds,
        # Random weights accept no draft, so the accept lengths of trees are assumptions and no measurements.
        "tokens_per_second_at_assumed_accept_length": {f"{length:g}": batch * length / seconds for length in accept_lengths},
        "context_grew_by": drift,
        "first_run_seconds": first,
        **(built.columns if sampling == "greedy" else {}),
    }


def model(lab: Lab, tree: TreeShape, sampling: str, batch: int, context: int) -> float | None:
    """The time model's milliseconds at the measured bandwidth; None for a GPU that it does not know."""
    gpu, kind = known_gpu(lab.device.device_kind), SamplingKind.of(SAMPLING[sampling])
    if gpu is None:
        return None
    return sum(time_model(lab.pair, tree, batch, context, gpu, copy_speed=lab.bandwidth, kind=kind).values())


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

    merge = lab.merger()

    def prefill_program(params, state, chunk):
        return prefill(merge(params), state, chunk)

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
