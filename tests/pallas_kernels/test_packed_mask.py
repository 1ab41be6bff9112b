"""Masks as bits."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pallas_kernels.tree_attention.packed_mask import pack_mask

SHAPES = st.sampled_from([(1, 1, 1), (2, 3, 31), (1, 4, 32), (2, 2, 33), (1, 3, 100)])  # few: each is compiled once
MASKS = SHAPES.flatmap(lambda shape: arrays(bool, shape))


@given(MASKS)
def test_unpacking_undoes_packing(mask):
    words = np.asarray(pack_mask(jnp.asarray(mask)).bits)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits[..., : mask.shape[2]], mask)


@given(MASKS)
def test_the_stretch_holds_all_that_a_row_sees_and_no_more(mask):
    packed = pack_mask(jnp.asarray(mask))
    for row in np.ndindex(*mask.shape[:2]):
        seen = np.flatnonzero(mask[row])
        expected = (seen[0], seen[-1] + 1) if len(seen) else (mask.shape[2], 0)
        assert (int(packed.first[row]), int(packed.end[row])) == expected


def test_bits_behind_the_last_key_are_zero():
    np.testing.assert_array_equal(pack_mask(jnp.ones((1, 1, 33), bool)).bits, [[[-1, 1]]])  # 32 ones are -1
