"""Inputs of programs that stay on the device between launches.

They are copied again when they change, but not large page tables: most changes are a few entries, which are written into the
table that is there. So few bytes are sent, and a CUDA graph finds the table where it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decoding.programs import Program
from jaxspec.engine.messages import Kept, Leaf
from jaxspec.placement import Placement
from jaxspec.typing import Array, Int

SENT_WHOLE = 1 << 15
"""Bytes of an array that is always sent whole: up to this size the copy's fixed cost is most of it (an estimate), and a launch is
saved."""
MOST_ENTRIES = 64
"""Entries that are written into an array that is there; if more have changed, it is sent whole. 512 bytes."""


class Placed(NamedTuple):
    """An array on the device, and the values that it has."""

    values: np.ndarray
    array: jax.Array


def write_entries(array: Int[Array, "b p"], entries: Int[Array, "k 2"]) -> Int[Array, "b p"]:
    """Writes to places of the flat array.

    In:  [[5, 6], [7, 8]], entries [[1, 9], [2, 4]]
    Out: [[5, 9], [4, 8]]
    """
    places, values = entries.T
    return array.reshape(-1).at[places].set(values).reshape(array.shape)


class PlacedInputs:
    """Arrays on the device by program and name."""

    def __init__(self, placement: Placement, count: Callable[[np.ndarray], None]):
        """`count` is told of every array that is copied to the device."""
        self._placement, self._count = placement, count
        self._placed: dict[tuple[Program, str], Placed] = {}
        self._writers: dict[tuple[int, ...], jax.stages.Compiled] = {}
        """By the shape of the array."""

    def compile_for(self, shape: tuple[int, ...]) -> None:
        """Arrays of this shape need not be sent whole. Compiles, if they are large."""
        if shape not in self._writers and 4 * np.prod(shape) > SENT_WHOLE:
            sizes = shape, (MOST_ENTRIES, 2)
            array, entries = (jax.ShapeDtypeStruct(size, np.int32, sharding=self._placement.whole) for size in sizes)
            self._writers[shape] = jax.jit(write_entries, donate_argnums=0).lower(array, entries).compile()

    def get(self, program: Program, name: str, values: np.ndarray) -> Placed:
        """These values, int32, on the device. If they have not changed, the array of the program's previous launch is reused: a
        copy would wait for the running program, and a CUDA graph must be updated when an argument has moved."""
        placed = self._placed.get((program, name))
        if placed is None or not np.array_equal(placed.values, values):
            placed = self._placed[program, name] = Placed(values, self._new(placed, values))
        return placed

    def forget(self) -> None:
        """After a failure."""
        self._placed.clear()

    def _new(self, before: Placed | None, values: np.ndarray) -> jax.Array:
        writer = self._writers.get(values.shape)
        if writer is not None and before is not None:
            places = np.flatnonzero(before.values != values)
            if len(places) <= MOST_ENTRIES:
                places = np.resize(places, MOST_ENTRIES)  # repeated, which writes the same again
                entries = np.stack([places, values.reshape(-1)[places]], 1).astype(np.int32)
                self._count(entries)
                return writer(before.array, entries)
        self._count(values)
        return self._placement.put(values)


def leaves_to_send(arguments: Sequence[Any]) -> list[Leaf]:
    """The arrays of a launch, for other processes; None for those on the device that were not placed here: the other
    processes have their own."""
    leaves: list[Leaf] = []
    for each in arguments:
        if isinstance(each, Placed):
            leaves.append(Kept(each.values))
        elif isinstance(each, np.ndarray):
            leaves.append(each)
        else:
            leaves += [leaf if isinstance(leaf, np.ndarray) else None for leaf in jax.tree.leaves(each)]
    return leaves
