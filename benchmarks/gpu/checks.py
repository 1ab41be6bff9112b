"""Is every kernel that a cycle runs right on this device? Each is compared with its definition, in float32 on the same numbers."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write import api as cache_write
from pallas_kernels.cutoff import api as cutoff
from pallas_kernels.fp8 import is_fp8, numbers
from pallas_kernels.product import Product
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.rms_norm import api as rms_norm
from pallas_kernels.rotate_qkv import api as rotate_qkv
from pallas_kernels.skinny_matmul import api as skinny_matmul
from pallas_kernels.tree_attention import api as tree_attention
from pallas_kernels.weight import Dense

from . import arrays
from .lab import Cases, Lab, Skip, Together
from .products import ROWS

BOUND = 2e-2
"""The largest allowed error in bfloat16; results are of order 1."""
STEP = 0.13
"""The same where numbers are rounded to 8 bits, and of a rough cut-off, whose steps are an eighth: the next one may be chosen."""
ORDER = ("pallas_triton", "reference", "mosaic")
"""The implementations that cycles on GPUs may run. How long Mosaic's takes to compile is unknown: it may end the process."""
ROW_SHAPES = ((8, 8), (1, 8), (1, 1))
"""Sequences, and rows per sequence, of the norms and rotations."""


class WrongResult(Exception):
    """An implementation differs from the reference."""


@dataclass(frozen=True)
class Checked:
    """A kernel and the calls of it that are compared."""

    kernel: str
    function: Callable[..., Any]
    """Takes the arguments that `calls` make, and `implementation`."""
    implementations: Collection[str]
    calls: Mapping[str, Callable[[], tuple[Any, ...]]]
    """Functions that make the arguments, by the name of the shape."""
    bound: float = BOUND
    """The largest allowed difference from the reference."""

    def lower(self, name: str, shape: str) -> jax.stages.Lowered:
        """One of the implementations for one of the calls."""
        return jax.jit(partial(self.function, implementation=name)).lower(*jax.eval_shape(self.calls[shape]))

    @property
    def smallest(self) -> str:
        """The call with the fewest numbers."""
        sizes = {shape: sum(x.size for x in jax.tree.leaves(jax.eval_shape(make))) for shape, make in self.calls.items()}
        return min(sizes, key=lambda shape: sizes[shape])


def checked_kernels(lab: Lab) -> Iterator[Checked]:
    """Every kernel that a cycle runs: first with 16 bits, then with 8 and 4."""

    def of_shapes(make: Callable, *options: Any) -> dict[str, Callable]:
        return {str(shape): partial(make, lab, shape, *options) for shape in arrays.shapes(lab)}

    def of_rows(make: Callable, *options: Any) -> dict[str, Callable]:
        return {f"{rows} rows, batch {batch}": partial(make, lab, batch, rows, *options) for batch, rows in lab.few(ROW_SHAPES)}

    eps, side, plain = lab.size.target.rms_norm_eps, arrays.side(lab), arrays.layout(lab)
    yield Checked("rms_norm", partial(rms_norm.rms_norm, eps=eps), rms_norm.IMPLEMENTATIONS, of_rows(arrays.norm))
    yield Checked("norm_pair", partial(rms_norm.norm_pair, eps=eps), rms_norm.PAIR_IMPLEMENTATIONS, of_rows(arrays.norm_pair))
    for matmul in (None, "auto", "skinny"):
        name, function = "add_norm" + of_product(matmul), partial(with_product, rms_norm.add_norm, 1, matmul, eps=eps)
        yield Checked(name, function, rms_norm.ADD_IMPLEMENTATIONS, of_rows(arrays.addition, matmul is not None))
    for matmul in ("auto", "skinny"):
        function, calls = partial(with_product, partial(rotate, plain), 0, matmul), of_rows(arrays.rotation, plain, True)
        yield Checked("rotate_qkv" + of_product(matmul), function, rotate_qkv.IMPLEMENTATIONS, calls)
    for rough in (False, True):
        name, bound = f"cutoff{', rough' if rough else ''}", STEP if rough else BOUND
        yield Checked(name, partial(cut, rough), cutoff.IMPLEMENTATIONS, of_rows(arrays.cut), bound)
    for bits in (16, 8):
        calls, layout = of_shapes(arrays.attention, bits), replace(plain, fp8=bits == 8)
        yield Checked(f"tree_attention, {bits} bits", tree_attention.tree_attention, tree_attention.IMPLEMENTATIONS, calls)
        calls = of_shapes(arrays.write, bits)  # it copies, so it must be exact
        yield Checked(f"cache_write, {bits} bits", cache_write.cache_write, cache_write.IMPLEMENTATIONS, calls, bound=0.0)
        calls, bound = of_rows(arrays.rotation, layout, False), STEP if bits == 8 else BOUND
        yield Checked(f"rotate_qkv, {bits} bits", partial(rotate, layout), rotate_qkv.IMPLEMENTATIONS, calls, bound)
    layout = replace(plain, norm_eps=1e-6)
    calls = of_rows(arrays.rotation, layout, False)
    yield Checked("rotate_qkv with norms", partial(rotate, layout), rotate_qkv.IMPLEMENTATIONS, calls)
    ways = {"": None, " int8": QuantizedAs("int8"), " fp8": QuantizedAs("fp8"), " fp8 in blocks": QuantizedAs("fp8", 128)}
    for note, how in (ways | {" int4": QuantizedAs.default("int4", side, for_cpu=False)}).items():
        calls = {
            f"{rows} rows{', SwiGLU' if gated else ''}": partial(arrays.product, lab, rows, how, gated)
            for rows, gated in product(lab.few(ROWS), (False, True))
            if rows <= skinny_matmul.MAX_ROWS or not (how is None or gated)
        }
        yield Checked(f"skinny_matmul{note}", multiply, skinny_matmul.IMPLEMENTATIONS, calls)


def of_product(matmul: str | None) -> str:
    return {None: "", "auto": " of a split product", "skinny": " of a skinny product"}[matmul]


def with_product(function: Callable, place: int, matmul: str | None, *arguments: Any, implementation: str, **static: Any) -> Any:
    """Calls a kernel that finishes a product; the reference's is always XLA's. `matmul`: None: the product is an array."""
    given = list(arguments)
    if matmul is not None:
        x, weight = given[place]
        given[place] = Product(x, Dense(weight), matmul="auto" if implementation == "reference" else matmul)
    return function(*given, implementation=implementation, **static)


def rotate(layout: Any, qkv: Any, positions: Any, frequencies: Any, norms: Any, scales: Any, *, implementation: str) -> Any:
    return rotate_qkv.rotate_qkv(qkv, positions, frequencies, norms, layout, scales, implementation=implementation)


def cut(rough: bool, logits: jax.Array, *rows: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array]:
    """The least logit that is kept, and the logarithm of how many are: implementations may round exp differently."""
    kept = cutoff.cutoff(logits, *rows, rough=rough, implementation=implementation).keeps(logits)
    return jnp.min(jnp.where(kept, logits, jnp.inf), -1), jnp.log(jnp.sum(kept, -1))


def multiply(x: jax.Array, weight: Any, epilogue: Any, *, implementation: str) -> Any:
    """As models ask for it: logits and parts of sums are float32, a gated product has x's dtype."""
    dtype = jnp.float32 if epilogue is None else None
    return skinny_matmul.skinny_matmul(x, weight, epilogue, dtype=dtype, implementation=implementation)


def check(lab: Lab) -> Cases:
    """One implementation at a time, because one may break the device; a kernel's programs are compiled together."""
    for name, checked in product(ORDER, checked_kernels(lab)):
        if name in checked.implementations:
            yield from comparisons(lab, checked, name, checked.calls)


def probe(lab: Lab) -> Cases:
    """The first minute: does anything work at all?"""
    for name, checked in product(ORDER, checked_kernels(lab)):
        if name in checked.implementations and name != "reference":
            yield from comparisons(lab, checked, name, [checked.smallest])


def comparisons(lab: Lab, checked: Checked, name: str, shapes: Iterable[str]) -> Cases:
    programs = Together({shape: partial(checked.lower, name, shape) for shape in shapes})
    for shape in shapes:
        case = {"kernel": checked.kernel, "implementation": name, "shape": shape}
        yield case, partial(compare_with_reference, lab, checked, name, shape, programs)


def compare_with_reference(lab: Lab, checked: Checked, name: str, shape: str, programs: Together[str]) -> dict[str, Any]:
    """The largest error, and the seconds for compiling and running."""
    started = time.perf_counter()
    program, arguments = compiled(lab, name, lambda: programs.take(shape)), checked.calls[shape]()
    got = jax.block_until_ready(program(*arguments))
    seconds = time.perf_counter() - started
    wide = jax.tree.map(lambda array: array.astype(jnp.float32) if array.dtype == lab.dtype else array, arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(checked.function, implementation="reference"))(*wide)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return {"error": max(compare(*each, checked.bound) for each in pairs), "bound": checked.bound, "first_call_seconds": seconds}


def compiled(lab: Lab, name: str, compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
    """The program. Raises Skip if the implementation does not support this shape or device."""
    if name == "reference":
        return compile()
    lab.need_gpu()
    try:
        return compile()
    except (ValueError, NotImplementedError) as error:
        raise Skip(f"refused: {type(error).__name__}: {str(error)[:200]}") from error


def compare(got: jax.Array, expected: jax.Array, bound: float) -> float:
    """The largest difference. Raises WrongResult if it is above the bound, or not a number."""
    got, expected = (numbers(each, jnp.float32) if is_fp8(each) else each.astype(jnp.float32) for each in (got, expected))
    error = float(jnp.max(jnp.abs(got - expected)))
    if not error <= bound:
        raise WrongResult(f"the largest difference from the reference is {error:g}, allowed are {bound:g}")
    return error
