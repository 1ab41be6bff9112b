"""Which programs there are, and that one of them fits every launch."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import EngineConfig
from jaxspec.decoding.programs import (
    AdmitProgram,
    CatchUpProgram,
    CycleProgram,
    MaskProgram,
    PrefillProgram,
    ProposeProgram,
    SettleProgram,
)
from jaxspec.engine.program_table import ProgramTable
from jaxspec.tree_shape import PLAIN, TreeShape

TREE, CHAIN = TreeShape(5, 4, 8), TreeShape(3, 1)


def table_of(*, most: int = 8, chunk: int = 256, pages: int = 64, others=(PLAIN,), catches_up: bool = True):
    config = EngineConfig(max_running_requests=most, prefill_chunk=chunk)
    return ProgramTable.of(config, pages, (TREE,), (TREE, *others), catches_up=catches_up)


tables = st.builds(
    table_of,
    most=st.integers(1, 70),
    chunk=st.integers(1, 1000),
    pages=st.integers(1, 300),
    others=st.sampled_from([(), (PLAIN,), (PLAIN, CHAIN)]),
)


@pytest.mark.parametrize("chunk", [256, 8192])
def test_the_sizes(chunk):
    table = table_of(most=20, chunk=chunk, pages=16)
    assert table.batches == (1, 2, 3, 4, 6, 8, 12, 16, 20) and table.few_batches == (1, 2, 4, 8, 16, 20)
    assert table.chunks == (16, 64, 128, 256) and table.prompts == (8, 4, 2, 1)


def test_every_program_of_the_built_in_model():
    table = table_of()
    cycles = {CycleProgram(batch, 64, TREE) for batch in (1, 2, 3, 4, 6, 8)}
    plain = {CycleProgram(batch, 64, PLAIN) for batch in (1, 2, 4, 8)}
    prefills = {PrefillProgram(chunk, 64) for chunk in (16, 64, 128, 256)}
    together = {PrefillProgram(16, 64, 8), PrefillProgram(64, 64, 4), PrefillProgram(128, 64, 2)}
    catch_ups = {CatchUpProgram(batch, 64) for batch in (1, 2, 4, 8)}
    assert set(table.all()) == {AdmitProgram(), MaskProgram()} | cycles | plain | prefills | together | catch_ups
    assert len(table.all()) == len(set(table.all())) == 23


@pytest.mark.parametrize("catches_up", [True, False])
def test_heads_that_lag_need_programs_to_catch_up(catches_up):
    table = table_of(catches_up=catches_up)
    for programs in (table.all(), table.largest(PLAIN), replace(table, own_first=False).first()):
        assert any(isinstance(program, CatchUpProgram) for program in programs) == catches_up


def test_trees_of_single_requests_compile_after_the_start_unless_they_change_the_text():
    first = [CycleProgram(8, 64, TREE), PrefillProgram(256, 64), AdmitProgram(), MaskProgram()]
    assert table_of().first() == first
    config = EngineConfig(max_running_requests=8, accept_threshold_acc=0.5)
    lossy = ProgramTable.of(config, 64, (TREE,), (TREE, PLAIN), catches_up=True)
    assert lossy.first() == [first[0], CatchUpProgram(8, 64), CycleProgram(8, 64, PLAIN), *first[1:]]


def test_after_the_start_a_cycle_of_one_request_compiles_first_and_then_what_grammars_gain_from():
    table = table_of()
    halves = [kind(size, 64, TREE) for size in (1, 8) for kind in (ProposeProgram, SettleProgram)]
    large = [CycleProgram(8, 64, TREE), CatchUpProgram(8, 64), CycleProgram(8, 64, PLAIN)]
    assert table.next_after_start() == [CycleProgram(1, 64, TREE), *halves, *large]
    assert table.ready(lambda program: program != halves[1]).in_two == (PLAIN,)


def test_small_programs_come_before_large_ones():
    programs = table_of().all()
    sizes = [program.batch for program in programs if isinstance(program, CycleProgram)]
    assert sizes == sorted(sizes)
    assert programs.index(PrefillProgram(16, 64)) < programs.index(CycleProgram(2, 64, TREE))


@given(tables, st.data())
def test_a_program_fits_every_launch_whichever_programs_are_there(table: ProgramTable, data: st.DataObject):
    """The first programs, and any others that came since, hold one for every launch. All candidates fit, the smallest first."""
    ready = set(table.first()) | data.draw(st.sets(st.sampled_from(table.all())))
    requests = data.draw(st.integers(1, table.batches[-1]))
    tokens = data.draw(st.integers(1, table.chunks[-1]))
    spec = data.draw(st.sampled_from([tree for tree in table.trees if ready >= set(table.largest(tree))]))
    cycles, prefills = list(table.cycles(requests, spec)), list(table.prefills(tokens))
    assert cycles and all(each.tree == spec and each.batch >= requests for each in cycles)
    assert prefills and all(each.chunk >= tokens for each in prefills)
    assert cycles == sorted(cycles, key=lambda each: each.batch)
    assert prefills == sorted(prefills, key=lambda each: each.chunk)
    together = table.prefill_together(tokens)
    assert together.chunk == prefills[0].chunk and together in table.all()
    assert together.size <= table.chunks[-1] and together.batch <= table.batches[-1]
    catch_ups = list(table.catch_ups(requests)) if table.catches_up else []
    assert all(each.batch >= requests for each in catch_ups)
    assert {each.pages for each in (*cycles, *prefills, *catch_ups)} == {table.pages}
    assert set(table.own) <= set(table.trees) and ready >= set(table.largest(TREE))
    for fitting in (cycles, prefills, *([catch_ups] if table.catches_up and spec == PLAIN else [])):
        assert set(fitting) <= set(table.all()) and ready & set(fitting)
    assert set(table.first()) <= set(table.all())


def test_a_batch_that_fits_none_has_no_program():
    assert not list(replace(table_of(), batches=(1, 2)).cycles(3, TREE))
