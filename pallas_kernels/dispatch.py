"""Which implementation of a kernel runs: the one that was asked for by name, or the one for the platform."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax

REFERENCE, GPU_DEFAULT = "reference", "pallas_triton"
"""The implementations that every kernel has: its definition in plain XLA, and what NVIDIA GPUs get."""


def call(kernel: str, implementations: Mapping[str, Callable], name: str | None, arguments: Sequence[Any], **static: Any) -> Any:
    """Calls the implementation with this name; None picks by the platform that the program is lowered for.

    `static`: further arguments, which are no arrays. Raises ValueError, which lists all names, if there is none of this one.
    """
    if name is None:
        both = (implementations[GPU_DEFAULT], implementations[REFERENCE])
        return by_platform(*both, tuple(static.items()))(*arguments)
    if name not in implementations:
        raise ValueError(f"unknown {kernel} implementation {name!r}; there are: {', '.join(implementations)}")
    return implementations[name](*arguments, **static)


@cache  # the layers of a model have equal shapes: traced once, not once a layer
def by_platform(on_gpu: Callable, reference: Callable, static: tuple[tuple[str, Any], ...] = ()) -> Callable:
    """A function that is `on_gpu` in programs for NVIDIA GPUs and `reference` in all others.

    What decides is the platform that a program is lowered for, so a program that is compiled for a GPU elsewhere has the kernel.
    Derivatives are the reference's: kernels have none, and training (of draft heads) is not what they are for.
    """
    on_gpu, reference = partial(on_gpu, **dict(static)), partial(reference, **dict(static))

    @jax.custom_jvp
    def either(*arguments):
        return jax.lax.platform_dependent(*arguments, cuda=on_gpu, default=reference)

    @either.defjvp
    def derivative(primals, tangents):
        return jax.jvp(reference, primals, tangents)

    return jax.jit(either)
