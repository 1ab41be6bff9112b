"""GPUs as XLA's compiler wants them described when there is none to ask."""

from typing import NamedTuple


class Description(NamedTuple):
    """What the compiler's choices depend on: from the vendor's data sheets and CUDA's table of compute capabilities."""

    name: str
    capability: int
    """Major compute capability; minor is 0."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 units of each."""
    clock_ghz: float
    l2_cache: int
    """Bytes, as the next four."""
    memory: int
    bandwidth: int
    """Per second."""
    shared_memory: int
    """Of each streaming multiprocessor."""
    block_shared_memory: int
    """Of it, what one block may have at most."""

    def text(self) -> str:
        """As a GpuTargetConfigProto in text form."""
        return f"""gpu_device_info {{
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
            shared_memory_per_block_optin: {self.block_shared_memory}
            core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock_ghz}
            l2_cache_size: {self.l2_cache} device_memory_size: {self.memory} memory_bandwidth: {self.bandwidth}
            cuda_compute_capability {{ major: {self.capability} }} }}
            platform_name: "CUDA" device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 8 }}"""


DESCRIPTIONS = {
    "h100": Description("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 52428800, 84942979072, 3352320000000, 233472, 232448),
    "h200": Description("NVIDIA H200", 9, 132, 128, 1.98, 62914560, 150754820096, 4800000000000, 233472, 232448),
    "a100": Description("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 41943040, 85094825984, 2039000000000, 167936, 166912),
}
"""By the name that `jaxspec plan --gpu` takes."""
