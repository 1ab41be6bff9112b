"""A cache of 8 bits: what it rounds, how many bytes it takes, and what it is refused for. Its texts: test_pairs.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import FP8, EngineConfig
from jaxspec.engine.models import cache_bytes_per_token, kernels_of
from jaxspec.models.layers import causal_metadata
from jaxspec.models.linear import Kernels
from jaxspec.testing import engine_target, random_head, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.tree_attention import tree_attention
from tests.engine.test_equality import PROMPTS, mixed_params, run

TREE = TreeShape(3, 2, 5)
PARAMS = mixed_params(len(PROMPTS))


@pytest.mark.exhaustive
def test_the_text_is_another_one_than_in_float32():
    """Otherwise nothing was rounded. A head with another cache changes nothing."""
    in_float32, expected = run(tiny_engine(PLAIN), PROMPTS, PARAMS), run(tiny_engine(PLAIN, kv_cache_dtype=FP8), PROMPTS, PARAMS)
    assert in_float32 != expected
    assert run(tiny_engine(TREE, kv_cache_dtype=FP8, draft_kv_cache_dtype="auto"), PROMPTS, PARAMS) == expected
    assert run(tiny_engine(TREE, draft_kv_cache_dtype=FP8), PROMPTS, PARAMS) == in_float32


def test_a_draft_s_cache_may_be_another_one():
    for options, kinds in (
        ({"kv_cache_dtype": FP8}, ("uint8", "uint8")),
        ({"kv_cache_dtype": FP8, "draft_kv_cache_dtype": "auto"}, ("uint8", "float32")),
        ({"draft_kv_cache_dtype": FP8}, ("float32", "uint8")),
        ({}, ("float32", "float32")),
    ):
        state = tiny_engine(**options).runner.programs.state
        assert tuple(str(layers[0].k.dtype) for layers in (state.cache, state.draft.cache)) == kinds
        assert state.features.last.dtype == state.draft.hidden.dtype == jnp.float32


def test_bytes_are_counted():
    wide, narrow = (tiny_engine(num_pages=10, kv_cache_dtype=kind) for kind in ("auto", FP8))
    assert wide.runner.cache_bytes == 4 * narrow.runner.cache_bytes
    target = engine_target().config
    models = target, random_head(target).config.layer
    assert narrow.runner.cache_bytes == 10 * 4 * sum(cache_bytes_per_token(each, FP8, jnp.float32) for each in models)


def test_logits_are_those_of_keys_and_values_rounded_by_hand():
    def attend(q, k_pages, v_pages, page_table, start, length, k, v, mask, scales, **options):
        k, v = (each.astype(jnp.float8_e4m3fn).astype(jnp.float32) for each in (k, v))
        return tree_attention(q, k_pages, v_pages, page_table, start, length, k, v, mask, scales, **options)

    target = engine_target()
    tokens, rows = jnp.asarray([PROMPTS[2]]), causal_metadata(1, len(PROMPTS[2]))
    kernels = Kernels(), Kernels(attend=attend), kernels_of(EngineConfig(kv_cache_dtype=FP8))
    wide, by_hand, narrow = (target.merge(target.params, each)(tokens, rows) for each in kernels)
    assert narrow.window[0].k.dtype == jnp.uint8
    np.testing.assert_allclose(narrow.hidden, by_hand.hidden, atol=1e-4)
    assert np.abs(narrow.hidden - wide.hidden).max() > 0.01


def test_what_is_not_supported_is_refused_by_name():
    for name in ("int8", "fp8_e5m2", "bfloat16"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype must be one of auto, fp8_e4m3, got '{name}'"):
            EngineConfig(kv_cache_dtype=name)
        with pytest.raises(ValueError, match="draft_kv_cache_dtype must be one of auto"):
            EngineConfig(draft_kv_cache_dtype=name)
    for option in ("kv_cache_dtype", "draft_kv_cache_dtype"):
        with pytest.raises(ValueError, match="attention_kernel='mosaic' can't read a cache of 8 bits"):
            EngineConfig(attention_kernel="mosaic", **{option: FP8})


def test_scales_make_room_for_large_keys():
    """Values of thousands are cut off at 448 without a scale."""
    plain, scaled = engine_target(), engine_target(kv_scales=True)
    tokens, rows = jnp.asarray([PROMPTS[2]]), causal_metadata(1, len(PROMPTS[2]))
    kernels = kernels_of(EngineConfig(kv_cache_dtype=FP8))
    heads, size = plain.config.num_heads * plain.config.head_dim, plain.config.num_kv_heads * plain.config.head_dim
    factor = np.ones(heads + 2 * size, np.float32)
    factor[heads + size :] = 1000.0  # of the values
    for target in (plain, scaled):
        for layer in target.params["layers"].values():
            layer["self_attn"]["qkv_proj"]["kernel"] *= factor
            layer["self_attn"]["o_proj"]["kernel"] /= 1000.0
    expected = plain.merge(plain.params)(tokens, rows).hidden

    def error(target, scale: float | None) -> float:
        if scale is not None:
            for layer in target.params["layers"].values():
                layer["self_attn"]["v_scale"] = jnp.full(target.config.num_kv_heads, scale, jnp.float32)
        got = target.merge(target.params, kernels)(tokens, rows).hidden
        return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))

    assert error(plain, None) > 2 * error(scaled, 30.0) > 0
    assert error(scaled, 1.0) == error(plain, None)
