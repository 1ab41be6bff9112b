"""C++ kernels for CPUs, on XLA's own threads: products (row_matmul) and attention (tree_attention)."""

from pallas_kernels.cpu.library import TARGETS as TARGETS
from pallas_kernels.cpu.library import what_is_missing as what_is_missing
