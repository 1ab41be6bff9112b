"""What the tests share must be what each would have compiled."""

import jax
import pytest

from jaxspec.decoding.programs import AdmitProgram, CycleProgram
from jaxspec.testing import engine_target, oracle_head, random_head, tiny_engine
from jaxspec.tree_shape import TreeShape

PROGRAM = CycleProgram(1, 64, TreeShape(3, 2, 5))


@pytest.mark.parametrize(
    "change",
    [
        lambda: dict(target=engine_target(rms_norm_eps=1e-3)),
        lambda: dict(target=engine_target(num_layers=7)),
        lambda: dict(head=random_head(engine_target().config, draft_vocab_size=None)),
        lambda: dict(head=oracle_head(engine_target().config, [1, 2])),
        lambda: dict(page_size=8),
        lambda: dict(num_pages=7),
        lambda: dict(draft_window_size=9),
        lambda: dict(accept_threshold_single=0.5),
        lambda: dict(attention_kernel="reference"),
        lambda: dict(matmul="skinny"),
        lambda: dict(kv_cache_dtype="fp8_e4m3"),
        lambda: dict(kv_cache_dtype="fp8_e4m3", draft_kv_cache_dtype="auto"),
        lambda: dict(draft_kv_cache_dtype="fp8_e4m3"),
    ],
)
def test_whatever_decides_a_program_is_part_of_its_identity(change):
    assert tiny_engine().runner.programs.identity(PROGRAM) != tiny_engine(**change()).runner.programs.identity(PROGRAM)


def test_so_are_jaxs_settings():
    programs = tiny_engine().runner.programs
    identity = programs.identity(PROGRAM)
    assert identity == programs.identity(PROGRAM) != programs.identity(AdmitProgram())
    with jax.default_matmul_precision("float32"):
        assert identity != programs.identity(PROGRAM)
