"""Splitting, norms and rotation as one launch. See `api.rotate_qkv`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.fp8 import Scales
from pallas_kernels.product import Product, load_sum, partial_sums
from pallas_kernels.rotate_qkv.reference import QkvLayout, stored


@jax.named_scope("rotate_qkv")
def pallas_triton_rotate(
    qkv: Float[Array, "b w width"] | Product,
    positions: Int[Array, "b w"],
    frequencies: Float[Array, " half"],
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    scales: Scales | None = None,
    *,
    layout: QkvLayout,
    interpret: bool = False,
) -> tuple[Float[Array, "b w heads head_dim"], Real[Array, "b w kv_heads head_dim"], Real[Array, "b w kv_heads head_dim"]]:
    """One program per row and head. XLA takes four launches, because it writes queries, keys and values separately."""
    batch, width = positions.shape
    rows, heads, kv_heads, head_dim = batch * width, layout.heads, layout.kv_heads, layout.head_dim
    parts, bias = partial_sums(qkv)
    kept = jax.ShapeDtypeStruct((rows, kv_heads, head_dim), jnp.uint8 if layout.fp8 else qkv.dtype)
    q, k, v = pl.pallas_call(
        partial(_rotate_head, layout=layout),
        grid=(rows, heads + 2 * kv_heads),
        out_shape=(jax.ShapeDtypeStruct((rows, heads, head_dim), qkv.dtype), kept, kept),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_qkv",
    )(parts, positions.reshape(rows), frequencies, bias, norms, scales)
    return tuple(part.reshape(batch, width, -1, head_dim) for part in (q, k, v))


def _rotate_head(parts_ref, positions_ref, frequencies_ref, bias_ref, norm_refs, scale_refs, *out_refs, layout: QkvLayout):
    """Program (row, head). `out_refs`: q, k and v."""
    row, head = pl.program_id(0), pl.program_id(1)
    is_query, is_key = head < layout.heads, (head >= layout.heads) & (head < layout.heads + layout.kv_heads)
    half = layout.head_dim // 2
    columns = jnp.arange(pl.next_power_of_2(half))
    inside = columns < half
    places = [head * layout.head_dim + columns + offset for offset in (0, half)]
    halves = [load_sum(parts_ref, bias_ref, row, place, inside).astype(out_refs[0].dtype) for place in places]
    turned = [part.astype(jnp.float32) for part in halves]
    if layout.norm_eps is not None:
        mean = (jnp.sum(turned[0] * turned[0]) + jnp.sum(turned[1] * turned[1])) / layout.head_dim
        scale = jax.lax.rsqrt(mean + layout.norm_eps)
        for part, offset in enumerate((0, half)):
            q_weight, k_weight = (pltriton.load(ref.at[columns + offset], mask=inside, other=0) for ref in norm_refs)
            normed = (turned[part] * scale).astype(q_weight.dtype) * jnp.where(is_query, q_weight, k_weight)
            turned[part] = normed.astype(jnp.float32)
    frequencies = pltriton.load(frequencies_ref.at[columns], mask=inside, other=0)
    angle = positions_ref[row].astype(jnp.float32) * frequencies
    cos, sin = layout.attention_factor * jnp.cos(angle), layout.attention_factor * jnp.sin(angle)
    turned = [turned[0] * cos - turned[1] * sin, turned[1] * cos + turned[0] * sin]
    # Each program writes to one of the three; masks instead of branches, so that no thread waits.
    outputs = (
        (turned, is_query, 0, None),
        (turned, is_key, layout.heads, scale_refs and scale_refs.k),
        (halves, ~(is_query | is_key), layout.heads + layout.kv_heads, scale_refs and scale_refs.v),
    )
    for (values, mine, first_head, scale_ref), out_ref in zip(outputs, out_refs, strict=True):
        own_head = jnp.where(mine, head - first_head, 0)
        for part, offset in enumerate((0, half)):
            rounded = values[part].astype(out_refs[0].dtype)
            if layout.fp8 and out_ref is not out_refs[0]:
                rounded = stored(rounded, None if scale_ref is None else scale_ref[own_head])
            pltriton.store(out_ref.at[row, own_head, columns + offset], rounded, mask=inside & mine)
