"""From the fused projection to queries, keys and values, rotated."""

from pallas_kernels.rotate_qkv.api import QkvLayout as QkvLayout
from pallas_kernels.rotate_qkv.api import rotate_qkv as rotate_qkv
