"""The one attention function of the project: committed pages plus a dense window."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.dispatch import by_platform, call
from pallas_kernels.fp8 import Scales
from pallas_kernels.tree_attention.cpu import cpu_attention
from pallas_kernels.tree_attention.pallas_triton import pallas_triton_attention
from pallas_kernels.tree_attention.reference import reference_attention
from pallas_kernels.tree_attention.triton_tiling import unsupported


# Imported on use: importing Mosaic takes a third of a second, and few programs need it.
def _mosaic(*arguments: Any) -> Array:
    from pallas_kernels.tree_attention.mosaic import mosaic_attention

    *arrays, scales = arguments
    if scales is not None:
        raise ValueError("mosaic_attention: scales are for a cache of 8 bits, which it can't read")
    return mosaic_attention(*arrays)


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": reference_attention,
    "pallas_triton": pallas_triton_attention,
    "mosaic": _mosaic,
}


def tree_attention(
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
    *,
    implementation: str | None = None,
) -> Float[Array, "b w heads head_dim"]:
    """Scaled dot-product attention of w rows per sequence over its cache and over the window.

    A row sees the cache slots start <= i < length (slot i is entry i % page of page page_table[i // page]) and the window keys
    where its row of `mask` is true. Where there is a window, every row that is used must see a key of it. Other
    rows' results are finite and mean nothing; the C++ kernel writes zeros without reading the cache. Plain decoding, a draft
    level, verification and chunked prefill are this function with different masks.

    Args:
        q: queries; heads are grouped so that query head h reads KV head h // (heads // kv_heads).
        k_pages, v_pages: the committed cache of one layer, in q's dtype or as bytes of `fp8.encode`. Slots outside
            start .. length - 1 may hold anything, even NaN.
        page_table: pages of each sequence, in order; unused entries may be any valid page.
        start, length: the visible range of the cache.
        k_window, v_window: keys and values that are not in the cache, including those of the rows being computed; stored as
            the cache is, so that a token sees the same numbers before and after they are committed.
        mask: the window keys that each row sees.
        scales: what stored keys and values are multiplied by. None: 1.
        implementation: a name from IMPLEMENTATIONS; None picks by the platform that the program is lowered for, `pallas_triton` on
            CUDA (`reference` if `triton_tiling.unsupported`) and `cpu_attention` elsewhere. Only None and `reference` have
            derivatives.

    Returns:
        [b, w, heads, head_dim] in q's dtype; the softmax runs in float32.

    Raises:
        ValueError: the name of the implementation is unknown, or it does not support these shapes or dtypes.
    """
    arguments = (q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask, scales)
    if implementation is None:
        on_gpu = reference_attention if unsupported(q, k_pages, v_pages, k_window, v_window) else pallas_triton_attention
        return by_platform(on_gpu, cpu_attention, reference_attention)(*arguments)
    return call("tree_attention", IMPLEMENTATIONS, implementation, arguments)
