"""Several ways to run the same requests, side by side."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.options import BenchmarkError
from benchmarks.side_by_side import alternate, check_nothing_compiled, parts_of, side_by_side
from jaxspec.commands.common import table
from jaxspec.commands.workbench import CompilationCounter, Pass


def test_parts_are_whole_and_hold_every_request():
    assert parts_of(3, 1) == [range(0, 1), range(1, 2), range(2, 3)]
    assert parts_of(9, 4) == [range(0, 8), range(8, 16)]
    assert parts_of(2, 16) == [range(0, 32), range(32, 64)]  # two at least, so that order can turn
    assert parts_of(1, 1) == [range(0, 1), range(1, 2)]


def test_order_turns_from_part_to_part_and_from_round_to_round():
    ran = []

    def run_part(way: str, part: range) -> Pass:
        ran.append(way + str(part.start))
        return Pass(seconds=1.0, tokens=[(1, 2)])

    for number in (0, 1):
        passes = side_by_side(["a", "b"], parts_of(2, 1), run_part, number)
        assert [each.seconds for each in passes] == [2.0, 2.0]
    assert ran == ["a0", "b0", "b1", "a1", "b0", "a0", "a1", "b1"]


def test_passes_in_a_row_are_one_pass():
    first = Pass(2.0, [(1, 2), (3,)], [(2,), (1,)], 0.001, 0.004, 0.010, 1)
    second = Pass(1.0, [(4, 5, 6)], [(3,)], 0.004, 0.002, 0.080, 2)
    both = first + second
    assert both.seconds == 3.0 and both.cycles == 3
    assert both.tokens == [(1, 2), (3,), (4, 5, 6)] and both.accept_lengths[2] == (3,)
    assert both.per_cycle_ms == pytest.approx({"host": 5 / 3, "launch": 2.0, "wait": 30.0})
    assert both.tokens_per_second == 2.0


def test_a_compilation_while_time_is_taken_is_an_error():
    counter = CompilationCounter()
    check_nothing_compiled(counter, before=0)
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    with pytest.raises(BenchmarkError, match="compiled during the timed part"):
        check_nothing_compiled(counter, before=0)


def test_small_helpers():
    assert list(alternate(["a", "b"], 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert table(["a", "b"], [["x", "10"]]).splitlines()[1] == "|---|---:|"
