"""The GPUs that `jaxspec plan` knows: data-sheet numbers, and descriptions for XLA's compiler where there is no GPU to ask."""

from typing import NamedTuple

DRIVER, CUB = "13.0.0", "3.1.2"
"""The CUDA version of driver 580, and the version of CUB that JAX's plugins are built with (0.11.2 and 0.12). XLA must know both:
without the driver version it keeps library and custom calls out of CUDA graphs; without CUB's it doesn't turn sorts into calls to
CUB, as it does on a device."""


class CompilerTarget(NamedTuple):
    """The properties that the compiler's choices depend on (from data sheets and CUDA's table of compute capabilities)."""

    name: str
    """A name that JAX's table of GPUs for Pallas has (`jax/_src/pallas/triton/gpu_info.py`)."""
    capability: tuple[int, int]
    """Compute capability: major and minor."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 units per multiprocessor."""
    threads: int
    """The most that one multiprocessor holds."""
    clock_ghz: float
    l2_cache: int
    """Bytes, as in the next four."""
    memory: int
    bandwidth: int
    """Per second."""
    shared_memory: int
    """Per multiprocessor."""
    block_shared_memory: int
    """The most that one block may use of it."""

    def text(self, driver: str = DRIVER) -> str:
        """A GpuTargetConfigProto in text form; `driver` is the CUDA version of the driver."""
        major, minor = self.capability
        return f"""gpu_device_info {{
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
            shared_memory_per_block_optin: {self.block_shared_memory}
            core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock_ghz}
            l2_cache_size: {self.l2_cache} device_memory_size: {self.memory} memory_bandwidth: {self.bandwidth}
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            driver_version: "{driver}" cub_version: "{CUB}" }}
            platform_name: "CUDA" device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 8 }}"""


class Gpu(NamedTuple):
    """One GPU, from the vendor's data sheet. A board may have a little more or less, and no program reaches the peaks."""

    name: str
    memory: float
    """Bytes; the data sheet's GB, taken as 10^9."""
    bandwidth: float
    """Bytes per second, between the GPU and its memory."""
    arithmetic: float
    """Floating-point operations per second: dense matrix products of 16-bit numbers, summed in 32 bits."""
    compiler: CompilerTarget | None = None
    """None: programs can't be compiled for this GPU without having one."""


def _gpu(name: str, gigabytes: float, gigabytes_per_second: float, teraflops: float, *compiler: CompilerTarget) -> Gpu:
    return Gpu(name, gigabytes * 1e9, gigabytes_per_second * 1e9, teraflops * 1e12, *compiler)


_HOPPER, _AMPERE, _ADA = (233472, 232448), (167936, 166912), (102400, 101376)
"""Shared memory of a multiprocessor and of a block."""
H100 = CompilerTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 1.98, 52428800, 84942979072, 3352320000000, *_HOPPER)
H200 = CompilerTarget("NVIDIA H200", (9, 0), 132, 128, 2048, 1.98, 62914560, 150754820096, 4800000000000, *_HOPPER)
A100 = CompilerTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 1.41, 41943040, 85094825984, 2039000000000, *_AMPERE)
L40S = CompilerTarget("NVIDIA L40", (8, 9), 142, 128, 1536, 2.52, 100663296, 48305799168, 864000000000, *_ADA)
"""Called by the name of the L40, the same chip: JAX's table has no L40S."""
RTX_4090 = CompilerTarget("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 2.52, 75497472, 25757220864, 1008000000000, *_ADA)
GPUS = {
    "b200": _gpu("NVIDIA B200 SXM", 180, 8000, 2250),
    "h200": _gpu("NVIDIA H200 SXM", 141, 4800, 989, H200),
    "h100": _gpu("NVIDIA H100 SXM", 80, 3350, 989, H100),
    "h100-nvl": _gpu("NVIDIA H100 NVL", 94, 3900, 835),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", 80, 2000, 756),
    "a100": _gpu("NVIDIA A100 SXM, 80 GB", 80, 2039, 312, A100),
    "a100-40gb": _gpu("NVIDIA A100 SXM, 40 GB", 40, 1555, 312),
    "l40s": _gpu("NVIDIA L40S", 48, 864, 362, L40S),
    "l4": _gpu("NVIDIA L4", 24, 300, 121),
    "a10": _gpu("NVIDIA A10", 24, 600, 125),
    "rtx-5090": _gpu("NVIDIA GeForce RTX 5090", 32, 1792, 209.5),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 24, 1008, 165, RTX_4090),
}
"""By the name that --gpu takes."""
