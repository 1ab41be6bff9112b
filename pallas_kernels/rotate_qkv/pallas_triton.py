"""Splitting, norms and rotation as one launch. See `api.rotate_qkv`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.rotate_qkv.layout import QkvLayout


@jax.named_scope("rotate_qkv")
def pallas_triton_rotate(
    qkv: Float[Array, "b w width"],
    cos: Float[Array, "b w half"],
    sin: Float[Array, "b w half"],
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    layout: QkvLayout,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b w heads head_dim"], Float[Array, "b w kv_heads head_dim"], Float[Array, "b w kv_heads head_dim"]]:
    """One program per row and head. XLA takes four launches, because it writes queries, keys and values separately."""
    batch, width = qkv.shape[:2]
    rows, heads, kv_heads, head_dim = batch * width, layout.heads, layout.kv_heads, layout.head_dim
    q, k, v = pl.pallas_call(
        partial(_rotate_head, layout=layout),
        grid=(rows, heads + 2 * kv_heads),
        out_shape=[jax.ShapeDtypeStruct((rows, count, head_dim), qkv.dtype) for count in (heads, kv_heads, kv_heads)],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_qkv",
    )(qkv.reshape(rows, -1, head_dim), cos.reshape(rows, -1), sin.reshape(rows, -1), *(norms or ()))
    return tuple(part.reshape(batch, width, -1, head_dim) for part in (q, k, v))


def _rotate_head(qkv_ref, cos_ref, sin_ref, *refs, layout: QkvLayout):
    """Program (row, head); `refs` are the norms' weights, if there are any, then q, k and v."""
    row, head = pl.program_id(0), pl.program_id(1)
    is_query, is_key = head < layout.heads, (head >= layout.heads) & (head < layout.heads + layout.kv_heads)
    half = layout.head_dim // 2
    columns = jnp.arange(pl.next_power_of_2(half))
    inside = columns < half
    halves = [pltriton.load(qkv_ref.at[row, head, columns + offset], mask=inside, other=0) for offset in (0, half)]
    turned = [part.astype(jnp.float32) for part in halves]
    if layout.norm_eps is not None:
        mean = (jnp.sum(turned[0] * turned[0]) + jnp.sum(turned[1] * turned[1])) / layout.head_dim
        scale = jax.lax.rsqrt(mean + layout.norm_eps)
        for part, offset in enumerate((0, half)):
            q_weight, k_weight = (pltriton.load(ref.at[columns + offset], mask=inside, other=0) for ref in refs[:2])
            normed = (turned[part] * scale).astype(q_weight.dtype) * jnp.where(is_query, q_weight, k_weight)
            turned[part] = normed.astype(jnp.float32)
    cos, sin = (pltriton.load(ref.at[row, columns], mask=inside, other=0) for ref in (cos_ref, sin_ref))
    turned = [turned[0] * cos - turned[1] * sin, turned[1] * cos + turned[0] * sin]
    # Each program writes to one of the three; masks instead of branches, so that no thread waits.
    outputs = (
        (turned, is_query, 0),
        (turned, is_key, layout.heads),
        (halves, ~(is_query | is_key), layout.heads + layout.kv_heads),
    )
    for (values, mine, first_head), out_ref in zip(outputs, refs[-3:], strict=True):
        for part, offset in enumerate((0, half)):
            where = out_ref.at[row, jnp.where(mine, head - first_head, 0), columns + offset]
            pltriton.store(where, values[part].astype(out_ref.dtype), mask=inside & mine)
