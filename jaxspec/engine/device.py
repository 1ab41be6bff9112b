"""What a device can run and hold."""

import ctypes
import math

import jax
import numpy as np

from jaxspec.decoding.state import State

GRAPHS_SINCE = (12, 3)
"""The CUDA version of the first driver (545) whose graphs have conditionals. With an older one XLA makes no graph of a cycle."""
ADDRESSABLE_ENTRIES = 2**31
"""The most entries of an 8-bit cache's array on one GPU. Pallas computes offsets in 32 bits unless an array has more than 2**32
bytes, and they count entries, so with one byte per entry they would overflow from here on."""


def check_kernel(name: str | None, device: jax.Device) -> None:
    """Raises ValueError if the attention kernel can't run on the device."""
    if name in (None, "reference"):
        return
    if device.platform != "gpu":
        raise ValueError(f"attention_kernel={name!r} needs an NVIDIA GPU, and JAX runs on the {device.platform}: leave it out")
    if name == "mosaic" and device.compute_capability != "9.0":
        raise ValueError(
            f"attention_kernel='mosaic' is for Hopper, compute capability 9.0, and this is {device.compute_capability}"
        )


def driver_version() -> str | None:
    """The CUDA version of this machine's NVIDIA driver. None: it has none."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def makes_graphs(driver: str) -> bool:
    """Whether cycles are CUDA graphs with a driver of this CUDA version, such as 12.8.0."""
    return tuple(map(int, driver.split(".")[:2])) >= GRAPHS_SINCE


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may use on the device; None on a CPU.

    Raises:
        ValueError: the device does not tell.
    """
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(
            f"the {device.platform} does not tell how much memory JAX may use, as with XLA_PYTHON_CLIENT_ALLOCATOR=platform: "
            "unset that, or give num_pages"
        )
    return limit


def addressable_pages(one_page: State) -> float:
    """The number of pages that the GPU kernels can address in this state's 8-bit caches."""
    caches = [each for each in jax.tree.leaves(one_page) if each.dtype == np.uint8]
    return min((ADDRESSABLE_ENTRIES // math.prod(each.sharding.shard_shape(each.shape)) for each in caches), default=math.inf)
