"""Splits the output of the fused projection into queries, keys and values, norms them if the model does, and rotates them."""

from jaxtyping import Array, Float, Int, Real

from pallas_kernels.dispatch import call
from pallas_kernels.fp8 import Scales
from pallas_kernels.product import Product
from pallas_kernels.rotate_qkv.cpu import cpu_rotate
from pallas_kernels.rotate_qkv.pallas_triton import pallas_triton_rotate
from pallas_kernels.rotate_qkv.reference import QkvLayout, reference_rotate

IMPLEMENTATIONS = {"reference": reference_rotate, "pallas_triton": pallas_triton_rotate, "cpu": cpu_rotate}


def rotate_qkv(
    qkv: Float[Array, "b w width"] | Product,
    positions: Int[Array, "b w"],
    frequencies: Float[Array, " half"],
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    layout: QkvLayout,
    scales: Scales | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "b w heads head_dim"], Real[Array, "b w kv_heads head_dim"], Real[Array, "b w kv_heads head_dim"]]:
    """Queries, keys and values of rows: rotary position embedding over the pairs (x[i], x[i + head_dim / 2]), in float32.

    Args:
        qkv: the output of the fused projection, or the projection, not computed yet.
        positions: each row's position.
        frequencies: the angle per position of each pair, in float32.
        norms: weights of the query norm and the key norm; None exactly if layout.norm_eps is None.
        scales: what keys and values are divided by before they are stored in 8 bits. None: 1.
        implementation: a name from IMPLEMENTATIONS; None picks the kernel on a GPU and `cpu` elsewhere.

    Raises:
        ValueError: only one of norms and layout.norm_eps is given, the dtypes of norms and qkv differ, or the name of the
            implementation is unknown.
    """
    if (norms is None) != (layout.norm_eps is None):
        raise ValueError(f"norms {'are missing' if norms is None else 'were given'}, but layout.norm_eps is {layout.norm_eps}")
    if norms is not None and {norm.dtype for norm in norms} != {qkv.dtype}:
        raise ValueError(
            f"qkv is {qkv.dtype} and the norms are {', '.join(str(norm.dtype) for norm in norms)}: they must have the same dtype"
        )
    return call("rotate_qkv", IMPLEMENTATIONS, implementation, (qkv, positions, frequencies, norms, scales), layout=layout)
