"""How matrices are stored: row by row in the file's own bits gives the numbers, logits and texts of float32."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.gguf_file import write_directory
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.storing import Storing
from jaxspec.load import load_models
from jaxspec.models.layers import causal_metadata
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.testing import engine_target, random_eagle, tiny_engine, tiny_target, write_head, write_target
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.row_matmul import what_is_missing
from tests.checkpoints.test_gguf_file import MODELS, SIZES, gguf, write
from tests.engine.test_equality import PROMPTS, mixed_params, run
from tests.sets import exhaustive

Kind = gguf.GGMLQuantizationType
BIASES = {"qkv_bias": True}
IN_A_BATCH = ((TreeShape(1, 2, 3), 3),)
EVERY = ((PLAIN, 2), (TreeShape(3, 2, 5), 1), (TreeShape(3, 2, 5), 3))
"""Trees, and how many requests run together."""


def dtypes(model: LoadedTarget | LoadedHead) -> set[str]:
    """Of all matrices."""
    return {str(array.dtype) for array in jax.tree.leaves(model.params) if array.ndim == 2}


def logits(target: LoadedTarget, tokens: list[int]) -> np.ndarray:
    model = target.merge(target.params)
    return np.asarray(model.logits(model(jnp.asarray([tokens]), causal_metadata(1, len(tokens))).hidden))


@pytest.mark.variants
@pytest.mark.parametrize("dtype", ["bfloat16", exhaustive("float16"), exhaustive("float32")])
@pytest.mark.parametrize("tied", [True, exhaustive(False)])
def test_16_bits_stay_and_change_no_logit(tmp_path, dtype, tied):
    path = write_target(tmp_path / "model", tiny_target(tie_word_embeddings=tied, **BIASES), dtype)
    dense, rows, kept = (load_target(path, jnp.float32, storing=storing) for storing in Storing)
    assert (dtypes(dense), dtypes(rows), dtypes(kept)) == ({"float32"}, {"float32"}, {dtype})
    expected = logits(rows, PROMPTS[2])
    np.testing.assert_array_equal(logits(kept, PROMPTS[2]), expected)
    np.testing.assert_allclose(logits(dense, PROMPTS[2]), expected, atol=1e-5 * np.abs(expected).max())


def q4_with_others(name: str) -> object:
    """As in Q4_K_M files: values and `down` in more bits than the rest; here also a matrix without a kernel, and one in 32 bits."""
    for part, kind in {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q8_0, "blk.1.ffn_up": Kind.Q5_0, "blk.2.attn_output": None}.items():
        if part in name:
            return kind
    return Kind.Q8_0 if "token_embd" in name else Kind.Q4_1


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_of_a_file_stay_and_change_no_logit(tmp_path, kind):
    model = tiny_target(**SIZES, **MODELS[kind])
    write_directory(write(tmp_path / "model.gguf", model, kind, q4_with_others), tmp_path / "read")
    dense, rows, kept = (load_target(tmp_path / "read", jnp.float32, storing=storing) for storing in Storing)
    assert dtypes(rows) == {"float32"} and dtypes(kept) == {"uint8", "float32"}
    assert kept.params["embed_tokens"].dtype == "uint8"
    assert set(kept.params["layers"][0]["self_attn"]["qkv_proj"]) - {"bias"} == {"weights_0_blocks", "weights_1_blocks"}
    assert set(kept.params["layers"][2]["self_attn"]["o_proj"]) == {"rows"}
    tokens = [5, 0, 127, 64, 299]
    expected = logits(rows, tokens)
    for loaded, is_exact in ((kept, what_is_missing() is None), (dense, False)):  # the same bits are a promise of the kernels
        np.testing.assert_allclose(logits(loaded, tokens), expected, rtol=0, atol=0 if is_exact else 1e-5 * np.abs(expected).max())


@pytest.mark.variants
@pytest.mark.parametrize("sizes", [IN_A_BATCH, exhaustive(EVERY)])
def test_a_text_is_the_same_with_and_without_a_tree_alone_and_in_a_batch(tmp_path, sizes):
    """In the file's bits. (tests/engine/test_sources.py has the other storages.)"""
    target = engine_target(**BIASES)
    loaded = load_target(write_target(tmp_path / "target", target, jnp.bfloat16), jnp.float32, storing=(kept := Storing.AS_IN_FILE))
    head = load_head(write_head(tmp_path / "head", random_eagle(target.config), jnp.bfloat16), loaded, storing=kept)
    assert dtypes(head) == dtypes(loaded) == {"bfloat16"}
    params = mixed_params(len(PROMPTS))
    expected = run(tiny_engine(PLAIN, target=loaded, max_running_requests=1), PROMPTS, params)
    for tree, requests in sizes:
        engine = tiny_engine(tree, target=loaded, head=head, max_running_requests=requests)
        assert run(engine, PROMPTS, params) == expected


SAME_BITS = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxspec.checkpoints.loading import load_target
from jaxspec.checkpoints.storing import Storing
from jaxspec.models.layers import causal_metadata

loaded = load_target(Path(sys.argv[1]), jnp.float32, storing=Storing.AS_IN_FILE)
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, (3, 20)))

@jax.jit
def forward(params, tokens):
    model = loaded.merge(params)
    return model.logits(model(tokens, causal_metadata(*tokens.shape)).hidden)

whole = forward(loaded.params, tokens)
for batch, width in ((1, 1), (1, 2), (1, 5), (2, 3), (1, 8), (3, 6)):
    np.testing.assert_array_equal(forward(loaded.params, tokens[:batch, :width]), whole[:batch, :width])
"""


@pytest.mark.variants
@pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
def test_a_token_has_the_same_bits_in_any_window_and_batch(tmp_path):
    """So no tree, batch or chunk decides a near tie. (XLA's products, attention and norms depend on the number of rows; without
    optimizations, as in other tests, the rest of a layer does, too.)"""
    path = write_target(tmp_path / "target", tiny_target(hidden_size=256, head_dim=16, num_layers=2, **BIASES), jnp.bfloat16)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", SAME_BITS, path], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_token_map_chooses_rows_of_a_kept_embedding(tmp_path):
    target = tiny_target(tie_word_embeddings=True)
    (tmp_path / "map.json").write_text("[5, 3, 100]")
    loaded = load_target(write_target(tmp_path / "target", target, jnp.bfloat16), jnp.float32, storing=Storing.AS_IN_FILE)
    written = write_head(tmp_path / "head", random_eagle(target.config))
    head = load_head(written, loaded, token_map=tmp_path / "map.json", storing=Storing.AS_IN_FILE)
    np.testing.assert_array_equal(head.params["lm_head"]["rows"], loaded.params["embed_tokens"][jnp.array([5, 3, 100])])


@pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
@pytest.mark.parametrize(("dtype", "stored"), [("auto", "bfloat16"), ("float32", "float32")])
def test_on_a_cpu_auto_keeps_the_files_bits(tmp_path: Path, dtype, stored):
    loaded = load_models(write_target(tmp_path / "target", tiny_target(), jnp.bfloat16), dtype=dtype)
    assert dtypes(loaded.target) == {stored} and loaded.target.dtype == "float32"
