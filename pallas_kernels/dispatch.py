"""Which implementation of a kernel runs: the one that was asked for by name, or the one for the platform."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def by_platform(kernel: Callable, reference: Callable) -> Callable:
    """A function that is `kernel` in programs for NVIDIA GPUs and `reference` in all others.

    What decides is the platform that a program is lowered for, so a program that is compiled for a GPU elsewhere has the kernel.
    Derivatives are the reference's: kernels have none, and training (of draft heads) is not what they are for.
    """

    @jax.custom_jvp
    def either(*arguments):
        return jax.lax.platform_dependent(*arguments, cuda=kernel, default=reference)

    @either.defjvp
    def derivative(primals, tangents):
        return jax.jvp(reference, primals, tangents)

    return jax.jit(either)  # the layers of a model have equal shapes: traced once, not once a layer


def named(what: str, implementations: Mapping[str, Callable], name: str, arguments: Sequence[Any]) -> Any:
    """Calls the implementation with this name. Raises ValueError, which lists all, if there is none."""
    if name not in implementations:
        raise ValueError(f"unknown {what} implementation {name!r}; there are: {', '.join(implementations)}")
    return implementations[name](*arguments)
