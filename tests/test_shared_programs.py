"""What the tests share must be what each would have compiled."""

import os

import jax
import pytest

from jaxspec.config import TreeShape
from jaxspec.decoding.programs import AdmitProgram, CycleProgram
from jaxspec.testing import engine_target, oracle_head, random_head, tiny_engine
from tests.conftest import SharedPrograms, remove_oldest

PROGRAM = CycleProgram(1, 64, TreeShape(3, 2, 5))


def test_equal_programs_are_compiled_once():
    compiled, engines = [], [tiny_engine(target=engine_target(seed)).runner.programs for seed in (1, 2)]

    def compile_one(programs, program):
        compiled.append(program)
        return object()

    shared = SharedPrograms()
    compile_shared = shared.instead_of(compile_one)
    for _ in range(2):
        for program in (AdmitProgram(), PROGRAM):
            assert len({compile_shared(programs, program) for programs in engines}) == 1
    assert compiled == [AdmitProgram(), PROGRAM]
    shared.is_on = False
    assert compile_shared(engines[0], PROGRAM) is not compile_shared(engines[0], PROGRAM)


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


@pytest.mark.compiles
def test_a_test_about_compiling_shares_nothing(shared_programs):
    assert not shared_programs.is_on


def test_the_oldest_programs_are_removed_from_the_cache(tmp_path):
    for age, name in enumerate(("new", "old", "older")):
        (tmp_path / name).write_bytes(b"12345")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    remove_oldest(tmp_path, 10)
    assert {file.name for file in tmp_path.iterdir()} == {"new", "old"}
