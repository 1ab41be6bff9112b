"""Every kernel against its reference, on this device: is what it computes right there."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write.api import IMPLEMENTATIONS as WRITES
from pallas_kernels.cache_write.api import cache_write
from pallas_kernels.rms_norm.api import IMPLEMENTATIONS as NORMS
from pallas_kernels.rms_norm.api import rms_norm
from pallas_kernels.rotate_qkv.api import IMPLEMENTATIONS as ROTATIONS
from pallas_kernels.rotate_qkv.api import rotate_qkv
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS as ATTENTIONS
from pallas_kernels.tree_attention.api import tree_attention

from . import inputs
from .lab import Lab, Skip, Together

BOUND = 2e-2
"""Largest error in bfloat16; the results of benchmarks.gpu.inputs are of order 1."""
Cases = Iterator[tuple[dict, Callable[[], dict]]]


class WrongResult(Exception):
    """An implementation computes something else than the reference."""


@dataclass(frozen=True)
class Checked:
    """A kernel and the calls of it that are compared."""

    kernel: str
    function: Callable
    """Takes what `calls` make, and `implementation`."""
    implementations: Collection[str]
    bound: float
    """Largest difference from the reference that is allowed."""
    calls: Mapping[str, Callable[[], tuple[Any, ...]]]
    """What makes the arguments, by the name of the shape."""


def check(lab: Lab) -> Cases:
    """One implementation after the other, should one break the device."""
    for checked in checked_kernels(lab):
        for name in checked.implementations:
            programs = Together({shape: partial(lower, checked, name, make) for shape, make in checked.calls.items()})
            for shape in checked.calls:
                case = {"kernel": checked.kernel, "implementation": name, "shape": shape}
                yield case, partial(compare_with_reference, lab, checked, name, shape, programs)


def checked_kernels(lab: Lab) -> Iterator[Checked]:
    """All four; attention last, since its Mosaic kernel is the likeliest to end the worker."""

    def calls(make: Callable) -> dict[str, Callable]:
        return {str(shape): partial(make, lab, shape) for shape in lab.size.shapes}

    def row_calls(make: Callable, note: str = "") -> dict[str, Callable]:
        return {f"{rows} rows{note}, batch {batch}": partial(make, lab, batch, rows) for batch, rows in lab.size.row_shapes}

    yield Checked("cache_write", cache_write, WRITES, 0.0, calls(inputs.write))  # it moves numbers and must change none
    yield Checked("rms_norm", partial(rms_norm, eps=lab.size.target.rms_norm_eps), NORMS, BOUND, row_calls(inputs.norm))
    for layout in inputs.layouts(lab):
        made = row_calls(partial(inputs.rotation, layout), "" if layout.norm_eps is None else " with norms")
        yield Checked("rotate_qkv", partial(rotate_qkv, layout=layout), ROTATIONS, BOUND, made)
    yield Checked("tree_attention", tree_attention, ATTENTIONS, BOUND, calls(inputs.attention))


def lower(checked: Checked, name: str, make: Callable[[], tuple[Any, ...]]) -> jax.stages.Lowered:
    return jax.jit(partial(checked.function, implementation=name)).lower(*jax.eval_shape(make))


def compare_with_reference(lab: Lab, checked: Checked, name: str, shape: str, programs: Together[str]) -> dict:
    """Largest error against the reference in float32 on the same numbers."""
    program, arguments = taken(lab, programs, shape, name), checked.calls[shape]()
    wide = jax.tree.map(lambda array: array.astype(jnp.float32) if array.dtype == lab.dtype else array, arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(checked.function, implementation="reference"))(*wide)
    got = program(*arguments)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return {"error": max(compare(*each, checked.bound) for each in pairs), "bound": checked.bound}


def taken[Key](lab: Lab, programs: Together[Key], key: Key, name: str) -> jax.stages.Compiled:
    """The program; Skip with the reason if the implementation does not take this shape, or no device of this kind."""
    try:
        return programs[key]
    except Exception as error:
        refuses = isinstance(error, ValueError | NotImplementedError) or not lab.on_gpu
        if refuses and name != "reference":
            raise Skip(f"refused: {type(error).__name__}: {str(error)[:200]}") from error
        raise


def compare(got: jax.Array, expected: jax.Array, bound: float) -> float:
    """The largest difference. Raises WrongResult if it is above the bound, or not a number."""
    error = float(jnp.max(jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32))))
    if not error <= bound:
        raise WrongResult(f"the largest difference from the reference is {error:g}, allowed are {bound:g}")
    return error
