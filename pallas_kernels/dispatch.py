"""Selects the implementation of a kernel: by name, or by platform."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax

REFERENCE, GPU_DEFAULT, CPU_DEFAULT = "reference", "pallas_triton", "cpu"
"""The implementations that every kernel has: its definition in plain XLA, and the one for NVIDIA GPUs. The third, for CPUs, is
the definition unless a kernel has its own."""
lowered_for = jax.make_user_context(None)
"""`with lowered_for("cpu")` or `("cuda")`: what is traced inside is lowered for this platform only, so the forms for others are
not traced. None: for any."""


def call(kernel: str, implementations: Mapping[str, Callable], name: str | None, arguments: Sequence[Any], **static: Any) -> Any:
    """Calls the implementation with this name; None picks one by the platform that the program is lowered for.

    `static`: further arguments that are not arrays. Raises ValueError, listing all names, if the name is unknown.
    """
    if name is None:
        reference = implementations[REFERENCE]
        elsewhere = implementations.get(CPU_DEFAULT, reference)
        return by_platform(implementations[GPU_DEFAULT], elsewhere, reference, tuple(static.items()))(*arguments)
    if name not in implementations:
        raise ValueError(f"unknown {kernel} implementation {name!r}; there are: {', '.join(implementations)}")
    return implementations[name](*arguments, **static)


@cache  # the layers of a model have equal shapes: traced once, not once a layer
def by_platform(on_gpu: Callable, elsewhere: Callable, reference: Callable, static: tuple[tuple[str, Any], ...] = ()) -> Callable:
    """A function that runs `on_gpu` in programs for NVIDIA GPUs and `elsewhere` in all others.

    The platform that a program is lowered for decides, so a program compiled for a GPU on another machine has the kernel.
    Derivatives are the reference's: the kernels have none, because they are not meant for training.
    """
    on_gpu, elsewhere, reference = (partial(each, **dict(static)) for each in (on_gpu, elsewhere, reference))

    @jax.custom_jvp
    def either(*arguments):
        return choose(*arguments, on_gpu=on_gpu, elsewhere=elsewhere)

    @either.defjvp
    def derivative(primals, tangents):
        return jax.jvp(reference, primals, tangents)

    return jax.jit(either)


def choose[Result](*arguments: Any, on_gpu: Callable[..., Result], elsewhere: Callable[..., Result]) -> Result:
    """One of the two, by the platform that the program is lowered for."""
    match lowered_for.value:
        case None:
            return jax.lax.platform_dependent(*arguments, cuda=on_gpu, default=elsewhere)
        case "cuda":
            return on_gpu(*arguments)
        case _:
            return elsewhere(*arguments)
