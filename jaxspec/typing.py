"""Shape annotations, and the common dimension letters; others are said where they are used.

    b  sequences in a batch            w  window rows being computed now      s  window keys a row may see
    n  nodes of a draft tree           k  drafted tokens per row (topk)       j  rows of one extend (num_steps + 1)
    v  vocabulary                      h  hidden size                         f  feature size (3h for EAGLE-3)
    p  pages of one sequence           r  rows of the engine's state          c  candidates of a draft

Longer names (pages, page, heads, kv_heads, head_dim) are spelled out. Annotations are checked while tracing, in tests only.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, Real, UInt

__all__ = ["Array", "Bool", "Float", "Int", "KeysValues", "UInt"]


class KeysValues(NamedTuple):
    """Keys and values of one layer: its pages [pages, page, kv_heads, head_dim] or window rows [b, s, kv_heads, head_dim].

    In a cache of 8 bits both are bytes (pallas_kernels/fp8.py): a token is rounded before any other sees it, in the window as later
    in the cache.
    """

    k: Real[Array, "n1 n2 kv_heads head_dim"]
    v: Real[Array, "n1 n2 kv_heads head_dim"]
