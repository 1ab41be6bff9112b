"""jaxspec check-lossless: equal engines pass, different ones are told apart, with the place and the gap."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxspec import TreeShape
from jaxspec.commands.check_lossless import (
    Comparison,
    Difference,
    compare_all,
    differences,
    explain,
    main,
    show,
    verdict,
    ways_of_sampling,
)
from jaxspec.commands.workbench import run
from jaxspec.defaults import BUILT_IN_HEAD, UNASKED
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, tiny_engine
from jaxspec.tree_shape import PLAIN


@pytest.mark.parametrize("more", ["", "--speculative-ngram", "--draft ngram --kv-cache-dtype fp8"])
@pytest.mark.variants
def test_a_tree_changes_no_token(model, tmp_path, capsys, more):
    (tmp_path / "prompts.txt").write_text("one\ntwo words\n")
    flags = [*model.flags, "--trees", "1/1/2", "--batch", "1", "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "8"]
    assert main([*flags, *more.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "lossless: all 4 outputs equal plain decoding, token for token"
    tried = [(each["tree"], each["batch"], each["sampling"], each["equal"]) for each in found["comparisons"]]
    assert tried == [("1/1/2", 1, way, 2) for way in ("greedy", "temperature 0.8")]


@pytest.fixture(scope="module")
def unequal() -> list[Comparison]:
    """A bench whose trees run on another model than plain decoding does."""
    right, wrong = engine_target(), engine_target(seed=5)

    def engine(spec: TreeShape, batch: int, context_length: int | None):
        """Larger than asked for: other tests have the same programs."""
        return tiny_engine(spec, target=right if spec == PLAIN else wrong)

    ways = ways_of_sampling(2, 6, 0.8, 0)
    return compare_all(SimpleNamespace(engine=engine), [[5, 9, 17], [40, 2]], [TreeShape(3, 2, 5)], [1], ways, 64)  # type: ignore


def test_a_difference_is_found_placed_and_explained(unequal):
    greedy, sampled = unequal
    assert (greedy.tree, greedy.batch, greedy.sampling, greedy.equal, greedy.total) == ("3/2/5", 1, "greedy", 0, 2)
    first = greedy.differences[0]
    assert first.prompt == 0 and first.expected[0] != first.found[0] and first.context.startswith("after '")
    gaps = [each.gap for each in greedy.differences]
    assert all(gap is None or gap > 0 for gap in gaps)  # plain decoding took its likeliest token
    assert [each.gap for each in sampled.differences] == [None] * len(sampled.differences)
    assert "3/2/5 at batch 1, greedy: prompt 0, generated token" in show(unequal)
    assert verdict(unequal).startswith("NOT EQUAL: ") and " of 4 outputs differ" in verdict(unequal)


def test_the_gap_is_the_model_s_own():
    engine = tiny_engine(PLAIN)
    (right,) = run(engine, [[5, 9, 17]], [SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)]).outputs
    (best, high), (_, _), (third, low) = right.logprobs[0].top
    gaps = [explain(Difference(0, 0, [best], [other]), right, None).gap for other in (third, 999)]
    assert gaps == [pytest.approx(high - low), None] and high > low


def test_the_exit_status_says_so(monkeypatch, unequal, capsys):
    monkeypatch.setattr("jaxspec.commands.check_lossless.check", lambda options: unequal)
    assert main([]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_the_first_difference_of_each_prompt_is_found():
    [found] = differences([[1, 2], [5, 6, 7]], [[1, 2], [5, 9, 7]])
    assert found == Difference(prompt=1, position=1, expected=[6, 7], found=[9, 7])
    assert differences([[1, 2]], [[1]]) == [Difference(prompt=0, position=1, expected=[2], found=[])]
    assert differences([[1, 2]], [(1, 2)]) == []


def test_a_near_tie_is_called_one():
    tie = Difference(0, 1, [6], [9], "after 'x': plain 'y', speculative 'z'", gap=0.001)
    comparison = Comparison("5/4/8", 1, "greedy", 9, 10, 2.0, [tie])
    assert "prefers its token by 0.001, a near tie\n    after 'x'" in show([comparison])
    assert verdict([comparison]) == "NOT EQUAL: 1 of 10 outputs differ from plain decoding: near ties, which rounding can decide"
    clear = Comparison("5/4/8", 1, "greedy", 2, 10, 2.0, [Difference(0, 1, [6], [9], gap=3.0)])
    assert "near tie" not in show([clear]) + verdict([clear]) and "and 7 more" in show([clear])
    for unlike in (replace(comparison, equal=8), replace(comparison, equal=8, differences=[tie, replace(tie, gap=None)])):
        assert "near ties" not in verdict([unlike]), "one is not listed, or has no gap"


def test_a_tree_of_drafts_is_compared_where_a_cpu_would_choose_plain_decoding(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(UNASKED, BUILT_IN_HEAD, UNASKED[None])
    compared = []
    monkeypatch.setattr("jaxspec.commands.check_lossless.compare_all", lambda _, __, trees, *___: compared.extend(trees) or [])
    (tmp_path / "prompts.txt").write_text("one\n")
    assert main(["--prompts", str(tmp_path / "prompts.txt")]) == 0 and compared == [TreeShape()]
    assert main(["--trees", "plain", "--batch", "1"]) == 2 and "--trees plain drafts nothing" in capsys.readouterr().err
