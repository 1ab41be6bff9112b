"""One test class for every implementation of tree attention: random cases against the NumPy definition."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import blocked, mosaic
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS, tree_attention
from pallas_kernels.tree_attention.cpu import cpu_attention
from pallas_kernels.tree_attention.reference import reference_attention
from pallas_kernels.tree_attention.triton_tiling import unsupported
from tests.pallas_kernels.attention_cases import CASES, DTYPES, TOLERANCES, Case, arrays, definition

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
SEEDS = 4
SMALL = Case("wide tree", 2, 8, 8, 4, 2, 64, 16, 3)
LARGE_IN_DEFAULT_SET = (
    Case("chain", 1, 2, 2, 2, 1, 64, 64, 34, longest=True),
    Case("itself", 1, 100, 100, 2, 2, 64, 16, 2, "bfloat16"),
)
"""Of the large cases those that show what no small one does: a merge in two chunks, and tiles of rows that skip a block."""


@functools.cache
def jitted(implementation: str | None):
    """The implementation as it runs here: kernels in interpret mode where there is no GPU."""
    if implementation in (None, "reference") or jax.default_backend() == "gpu":
        return jax.jit(functools.partial(tree_attention, implementation=implementation))
    module = importlib.import_module(f"pallas_kernels.tree_attention.{implementation}")
    return jax.jit(functools.partial(getattr(module, f"{implementation}_attention"), interpret=True))


def supported(implementation: str | None, case: Case) -> bool:
    if implementation != "mosaic":
        return True
    q = jax.ShapeDtypeStruct((case.b, case.w, case.heads, case.head_dim), DTYPES[case.dtype])
    stored = np.dtype(np.uint8) if case.fp8 else q.dtype
    pages = jax.ShapeDtypeStruct((case.b * case.table + 2, case.page, case.kv_heads, case.head_dim), stored)
    window = jax.ShapeDtypeStruct((case.b, case.s, case.kv_heads, case.head_dim), stored)
    return mosaic.unsupported(q, pages, pages, window, window) is None


def is_large(case: Case) -> bool:
    """Whether it has so many scores or slots that an interpreter takes seconds."""
    return case.w * case.s >= 4000 or case.b * case.table * case.page >= 1000


def combinations():
    """Every implementation (None: the platform's) with the cases that it supports. All seeds but the first are exhaustive.

    So are three quarters of the reference's cases, as other implementations are compared with the same definition.
    Interpreters are slow: two thirds of Triton's cases are variants, and large ones only in the exhaustive set. So are all of
    Mosaic, with one seed, whose interpreter looks for races: test_mosaic.py has the same kernel in the default set.
    """
    assert set(LARGE_IN_DEFAULT_SET) <= set(CASES)
    on_gpu = jax.default_backend() == "gpu"
    for implementation in (None, *IMPLEMENTATIONS):
        seeds = 1 if implementation in (None, "mosaic") and not on_gpu else SEEDS
        for place, case in enumerate(CASES):
            if supported(implementation, case):
                for seed in range(seeds):
                    is_slow = implementation == "mosaic" or (
                        implementation == "pallas_triton" and is_large(case) and case not in LARGE_IN_DEFAULT_SET
                    )
                    is_slow |= implementation == "reference" and place % 4 > 0
                    marks = [pytest.mark.exhaustive] if seed or (is_slow and not on_gpu) else []
                    if not marks and implementation == "pallas_triton" and place % 3 > 0:
                        marks = [pytest.mark.variants]
                    yield pytest.param(implementation, case, seed, id=f"{implementation}-{case}-{seed}", marks=marks)


def check(implementation: str | None, case: Case, values: dict[str, Any]) -> None:
    with jax.default_matmul_precision("highest"):  # GPUs would round float32 to TF32
        got = jitted(implementation)(*jax.tree.map(jnp.asarray, list(values.values())))
    assert got.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), definition(**values), rtol=0, atol=TOLERANCES[case.dtype])


@pytest.mark.parametrize(("implementation", "case", "seed"), list(combinations()))
def test_equals_the_definition(implementation, case, seed):
    check(implementation, case, arrays(case, seed))


class TestChoiceByPlatform:
    """What `implementation=None` does."""

    def test_unknown_implementations_are_named(self):
        with pytest.raises(ValueError, match="unknown tree_attention implementation 'cuda'; there are: reference, pallas_triton"):
            tree_attention(*map(jnp.asarray, arrays(SMALL, 0).values()), implementation="cuda")

    def test_runs_here(self):
        check(None, SMALL, arrays(SMALL, 1))

    def test_programs_for_the_cpu_have_no_kernel(self):
        lowered = jitted(None).trace(*map(jnp.asarray, arrays(SMALL, 0).values())).lower(lowering_platforms=("cpu",))
        assert "triton" not in lowered.as_text()

    @pytest.mark.parametrize("fp8", [False, True])
    @pytest.mark.parametrize(("table", "launches"), [(3, 1), (64, 2)], ids=["one split", "several splits"])
    def test_programs_for_cuda_have_at_most_two_launches_and_move_no_data(self, table, launches, fp8):
        case = Case("wide tree", 1, 8, 8, 4, 2, 64, 16, table, "bfloat16", fp8=fp8)
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        values = jax.tree.map(jnp.asarray, list(arrays(case, 0).values()))
        with jax.sharding.use_abstract_mesh(mesh):
            text = jitted(None).trace(*values).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == launches
        for operation in ("stablehlo.transpose", "stablehlo.gather", "stablehlo.concatenate", "stablehlo.dot", "stablehlo.slice"):
            assert operation not in text

    def test_gradient_is_the_reference_s(self):
        values = arrays(SMALL, 2)
        pages = {name: np.nan_to_num(values[name]) for name in ("k_pages", "v_pages")}
        q, *pages_and_rest = map(jnp.asarray, {**values, **pages}.values())

        def loss(implementation, q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask):
            out = tree_attention(
                q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask, implementation=implementation
            )
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

        by_platform, reference = (
            jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2, 6, 7)))(q, *pages_and_rest)
            for name in (None, "reference")
        )
        for got, expected in zip(by_platform, reference, strict=True):
            assert np.abs(expected).max() > 1e-3
            np.testing.assert_allclose(got, expected, atol=1e-6)


class TestBlocks:
    """What CPUs run: attention to one block of the cache after another."""

    CASE = Case("wide tree", 2, 4, 4, 4, 2, 16, 16, 40, longest=True)

    def test_only_blocks_that_a_sequence_sees_are_read(self, monkeypatch):
        values = arrays(self.CASE, 0) | {"start": np.array([300, 270]), "length": np.array([385, 640])}
        ranges, loop = [], jax.lax.fori_loop
        monkeypatch.setattr(jax.lax, "fori_loop", lambda *args: (ranges.append([int(each) for each in args[:2]]), loop(*args))[1])
        blocked.blocked_attention(*map(jnp.asarray, values.values()))
        assert [[first * blocked.BLOCK, last * blocked.BLOCK] for first, last in ranges] == [[256, 640]]

    def test_a_wider_page_table_changes_nothing(self):
        values = arrays(self.CASE, 0) | {"length": np.array([129, 500])}
        wide = values | {"page_table": np.pad(values["page_table"], ((0, 0), (0, 1000)))}
        programs = [jax.jit(blocked.blocked_attention).lower(*each.values()).compile() for each in (values, wide)]
        narrow_out, wide_out = (program(*each.values()) for program, each in zip(programs, (values, wide), strict=True))
        assert np.array_equal(narrow_out, wide_out)
        before, after = (program.memory_analysis().temp_size_in_bytes for program in programs)
        assert after - before <= 8 * 2 * 1024, "its entries take memory, not its slots"

    def test_a_row_that_sees_nothing_yet_is_no_nan(self):
        values = arrays(self.CASE, 1) | {"start": np.array([0, 200]), "length": np.array([640, 420])}
        values["mask"] = np.zeros_like(values["mask"])
        values["k_pages"], values["v_pages"] = np.nan_to_num(values["k_pages"]), np.nan_to_num(values["v_pages"])
        found = jax.jit(blocked.blocked_attention)(*map(jnp.asarray, values.values()))
        np.testing.assert_allclose(np.asarray(found, np.float64), definition(**values), rtol=0, atol=TOLERANCES[self.CASE.dtype])

    @pytest.mark.parametrize("attend", [blocked.blocked_attention, cpu_attention, reference_attention])
    def test_a_row_without_any_key_is_no_nan_and_changes_no_other(self, attend):
        """As in a chunk that a prompt does not fill: what later layers make of it must not be NaN, as 0 * NaN is NaN."""
        values = arrays(self.CASE, 1) | {"start": np.array([0, 0]), "length": np.array([0, 0])}
        whole = np.array(jax.jit(attend)(*map(jnp.asarray, values.values())))
        values["mask"][:, 2] = False
        found = np.array(jax.jit(attend)(*map(jnp.asarray, values.values())))
        assert np.isfinite(found).all()
        whole[:, 2] = found[:, 2]
        np.testing.assert_array_equal(found, whole)


class TestUnsupported:
    """The Triton kernel says at trace time what it can't do; then None takes the reference."""

    LARGE = Case("itself", 1, 1, 1, 1, 1, 512, 1, 1)

    def test_mixed_dtypes(self):
        values = arrays(SMALL, 0)
        with pytest.raises(ValueError, match="dtypes are bfloat16, float32, expected one of bfloat16, float16 and float32 for all"):
            jitted("pallas_triton")(*map(jnp.asarray, {**values, "q": jnp.asarray(values["q"], jnp.bfloat16)}.values()))

    def test_bytes_and_other_numbers(self):
        values = arrays(SMALL, 0)
        values["k_window"] = np.zeros(values["k_window"].shape, np.uint8)
        with pytest.raises(ValueError, match=r"dtypes are float32, uint8, expected .* or bytes of 8-bit numbers for all keys"):
            jitted("pallas_triton")(*map(jnp.asarray, values.values()))

    def test_mosaic_and_a_cache_of_8_bits(self):
        case = Case("wide tree", 2, 8, 8, 4, 2, 64, 16, 3, "bfloat16", fp8=True)
        *values, scales = jax.tree.map(jnp.asarray, list(arrays(case, 0).values()))
        with pytest.raises(ValueError, match="scales are for a cache of 8 bits, which it can't read"):
            tree_attention(*values, scales, implementation="mosaic")
        with pytest.raises(ValueError, match="k_pages has dtype uint8, expected q's, bfloat16"):
            tree_attention(*values, implementation="mosaic")

    def test_large_heads(self):
        with pytest.raises(ValueError, match="head_dim is 512, expected at most 256"):
            jitted("pallas_triton")(*map(jnp.asarray, arrays(self.LARGE, 0).values()))
        check(None, self.LARGE, arrays(self.LARGE, 0))

    def test_uneven_groups(self):
        q, k_pages, v_pages, *_, k_window, v_window, _ = arrays(Case("itself", 1, 1, 1, 3, 2, 64, 1, 1), 0).values()
        assert unsupported(q, k_pages, v_pages, k_window, v_window) == "q has 3 heads, expected a multiple of the 2 KV heads"

    def test_no_window_keys(self):
        values = {**arrays(SMALL, 3), "start": np.array([0, 0], np.int32), "length": np.array([9, 5], np.int32)}
        values["k_pages"], values["v_pages"] = np.nan_to_num(values["k_pages"]), np.nan_to_num(values["v_pages"])
        values |= {name: values[name][:, :0] for name in ("k_window", "v_window")} | {"mask": values["mask"][:, :, :0]}
        with pytest.raises(ValueError, match="k_window has no keys"):
            jitted("pallas_triton")(*map(jnp.asarray, values.values()))
        check(None, SMALL, values)
