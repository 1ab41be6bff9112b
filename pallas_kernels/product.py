"""Matrix products whose sum is finished by the kernel that reads them.

Few rows times a narrow matrix give too few tiles for a GPU, so the sum over k has to be split, and the parts be added. XLA does
that in a launch of its own. Here the parts are an array, and the next kernel (a norm, the rotation) adds them while it reads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.weight import Weight, gated


@partial(jax.tree_util.register_dataclass, data_fields=("x", "weight", "bias"), meta_fields=("matmul", "axis"))
@dataclass(frozen=True)
class Product:
    """x @ weight + bias, not computed yet."""

    x: Float[Array, "*rows k"]
    weight: Weight
    bias: Float[Array, " n"] | None = None
    matmul: str = "auto"
    """"skinny": by `skinny_matmul`, if there are at most 16 rows and the weight can. "auto": by the kernel that fits weight and
    platform. "xla": by XLA."""
    axis: str | None = None
    """The axis of the mesh whose devices each hold some rows of the weight, and of x's columns: their products add up to the
    whole. None: the weight is whole."""

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype

    def value(self, dtype: DTypeLike | None = None) -> Float[Array, "*rows n"]:
        """The product in this dtype, by default x's."""
        product = self.weight.dot(self.x, dtype, self.matmul)
        if self.axis is not None:
            product = jax.lax.psum(product, self.axis)
        return product if self.bias is None else product + self.bias

    def swiglu(self) -> Float[Array, "*rows half"]:
        """silu(gate) * up of the product's two halves."""
        return self.weight.swiglu(self.x, self.matmul) if self.bias is None else gated(self.value())


def value(product: Product | Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """The product, computed. An array is a product that has been computed already."""
    return product.value() if isinstance(product, Product) else product


def partial_sums(
    product: Product | Float[Array, "*rows n"],
) -> tuple[Float[Array, "splits rows n"], Float[Array, " n"] | None]:
    """Parts that add up to x @ weight (`Weight.parts`), and the bias. An array is one part, and so is what devices add up."""
    if not isinstance(product, Product):
        return product.reshape(1, -1, product.shape[-1]), None
    rows = product.x.reshape(-1, product.x.shape[-1])
    if product.axis is not None:
        # Parts of a part would have to be added up first, in a launch of their own. A single row is doubled as in Dense.parts.
        rows = jnp.broadcast_to(rows, (max(2, len(rows)), rows.shape[1]))
        parts = jax.lax.psum(product.weight.dot(rows, product.dtype, product.matmul), product.axis)[None]
    else:
        parts = product.weight.parts(rows, product.matmul)
    return parts, product.bias


def load_sum(parts_ref: Any, bias_ref: Any | None, row: Any, columns: Any, inside: Any) -> Float[Array, " columns"]:
    """In a Triton kernel: these columns of one row of the product, in float32, from `partial_sums`."""
    parts = [
        pltriton.load(parts_ref.at[part, row, columns], mask=inside, other=0).astype(jnp.float32)
        for part in range(parts_ref.shape[0])
    ]
    if bias_ref is not None:
        parts.append(pltriton.load(bias_ref.at[columns], mask=inside, other=0).astype(jnp.float32))
    return sum(parts[1:], start=parts[0])
