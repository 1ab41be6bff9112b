"""What GPUs have, from their vendors' data sheets: a board may have a little more or less, and no program reaches the peaks."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    memory: float
    """Bytes; the data sheet's GB, taken as 10^9."""
    bandwidth: float
    """Bytes per second, between the GPU and its memory."""
    arithmetic: float
    """Floating-point operations per second: dense matrix products of 16-bit numbers, summed in 32 bits."""


def _gpu(name: str, gigabytes: float, gigabytes_per_second: float, teraflops: float) -> Gpu:
    return Gpu(name, gigabytes * 1e9, gigabytes_per_second * 1e9, teraflops * 1e12)


GPUS = {
    "b200": _gpu("NVIDIA B200 SXM", 180, 8000, 2250),
    "h200": _gpu("NVIDIA H200 SXM", 141, 4800, 989),
    "h100": _gpu("NVIDIA H100 SXM", 80, 3350, 989),
    "h100-nvl": _gpu("NVIDIA H100 NVL", 94, 3900, 835),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", 80, 2000, 756),
    "a100": _gpu("NVIDIA A100 SXM, 80 GB", 80, 2039, 312),
    "a100-40gb": _gpu("NVIDIA A100 SXM, 40 GB", 40, 1555, 312),
    "l40s": _gpu("NVIDIA L40S", 48, 864, 362),
    "l4": _gpu("NVIDIA L4", 24, 300, 121),
    "a10": _gpu("NVIDIA A10", 24, 600, 125),
    "rtx-5090": _gpu("NVIDIA GeForce RTX 5090", 32, 1792, 209.5),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 24, 1008, 165),
}
"""By the name that --gpu takes."""
