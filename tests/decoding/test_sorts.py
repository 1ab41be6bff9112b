"""Compiled programs sort no vocabulary. (XLA replaces a call of top_k by a sort if the greatest value is also used alone.)"""

from functools import partial

import pytest

from jaxspec.planner.compile import Sort, read_sorts
from jaxspec.testing import engine_target, random_eagle, random_head, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape

VOCABULARY, DRAFTED = 640, 512
EAGLE3 = partial(random_head, draft_vocab_size=DRAFTED)
HEADS = {TreeShape(3, 2, 5): EAGLE3, TreeShape(3, 1, 4): random_eagle, TreeShape(2, 20, 21): EAGLE3, PLAIN: None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", HEADS, ids=str)
def test_no_program_sorts_a_vocabulary(tree):
    target, head = engine_target(vocab_size=VOCABULARY), HEADS[tree]
    engine = tiny_engine(tree, target=target, head=head and head(target.config))
    table, programs = engine.runner.table, engine.runner.programs
    sorts = {program: read_sorts(programs[program].as_text()) for program in [*table.first(), *next(table.halves(1, tree))]}
    assert any(map(len, sorts.values())) or tree.topk == 1  # a tree's nodes are sorted: the pattern finds sorts
    found = {program: [sort for sort in each if sort.size >= DRAFTED] for program, each in sorts.items()}
    assert not any(found.values()), found


def test_sorts_are_read_from_a_program():
    sort = '%s = (f32[2,640]{1,0}, s32[2,640]{1,0}) sort(%a, %b), dimensions={1}, metadata={op_name="jit(f)/draft/top_k"}'
    assert read_sorts(f"  {sort}\n  %t = f32[2,4] custom-call(%a)") == (Sort(640, "jit(f)/draft/top_k"),)
