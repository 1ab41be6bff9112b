"""Tree attention on CPUs: C++ (cpu.cc, rows.inc) where it runs, else `blocked_attention`.

A row's sums run over its own keys in order, in the cache and then in the window. So its bits are the same in a tree, in a chunk of
a prompt and alone, which XLA's products don't promise.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.fp8 import Scales
from pallas_kernels.tree_attention.blocked import blocked_attention

HEAD_DIMS = (16, 32, 64, 96, 128, 256)


def cpu_attention(
    q: Float[Array, "b w heads head_dim"],
    k_pages: Real[Array, "pages page kv_heads head_dim"],
    v_pages: Real[Array, "pages page kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    start: Int[Array, " b"],
    length: Int[Array, " b"],
    k_window: Real[Array, "b s kv_heads head_dim"],
    v_window: Real[Array, "b s kv_heads head_dim"],
    mask: Bool[Array, "b w s"],
    scales: Scales | None = None,
) -> Float[Array, "b w heads head_dim"]:
    """See `api.tree_attention`."""
    arrays = (q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask)
    is_float32 = all(array.dtype == jnp.float32 for array in (q, k_pages, v_pages, k_window, v_window))
    if what_is_missing() is not None or not is_float32 or q.shape[-1] not in HEAD_DIMS or scales is not None:
        return blocked_attention(*arrays, scales)
    return jax.ffi.ffi_call("tree_attention_float32", jax.ShapeDtypeStruct(q.shape, q.dtype))(*arrays)
