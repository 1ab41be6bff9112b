"""Chains against trees at equal node counts."""

import pytest

from benchmarks import acceptance
from jaxspec.commands.workbench import Pass
from jaxspec.tree_shape import TreeShape


def test_every_node_count_has_its_chain_and_trees():
    nodes = {}
    for each in acceptance.parse([]).trees:
        nodes.setdefault(each.num_draft_tokens, []).append(each.topk)
    assert len(nodes) > 2 and all(1 in topks and len(topks) > 1 for count, topks in nodes.items() if count < 32)


def test_rates_are_counted_by_hand():
    load = Pass(tokens=[(1, 2, 3, 4, 5, 6, 7, 8)], accept_lengths=[(3, 1, 2, 1)])  # the last was cut
    found = acceptance.describe(TreeShape(2, 2, 4), load, load)
    assert found["accept_length"] == 2.0
    assert found["accepted_at_depth"] == pytest.approx([2 / 3, 1 / 3])
    assert found["accepted_given_parent"] == pytest.approx([0.667, 0.5])
    assert found["accept_rate"] == pytest.approx(3 / 9)  # three of three times three drafts
    assert found["accept_length_of_prompts"] == [2.0] and found["kinds"] is None


def test_kinds_of_prompts_are_apart():
    load = Pass(tokens=[(1,)] * 4, accept_lengths=[(3, 1, 9), (1, 9), (2, 9), (9,)])
    found = acceptance.describe(TreeShape(2, 2, 4), load, load, ["code", "lists", "code", "lists"])
    assert found["kinds"] == {"code": 2.0, "lists": 1.0}
    assert acceptance.by_kind([found]).splitlines()[-2:] == ["| code           |  2.00 |", "| lists          |  1.00 |"]


@pytest.mark.exhaustive
def test_a_run_compares_chain_and_tree(tiny, tmp_path, newest, capsys):
    flags = ["--trees", "3/1/4", "2/2/4", "--max-tokens", "12", "--temperature", "0", "1", "--batch-size", "2"]
    flags += ["--out", str(tmp_path / "out.jsonl")]
    assert acceptance.main([*tiny, *flags]) == 0
    results = newest()["results"]
    assert list(results["temperatures"]) == ["0", "1"] and list(results["distributions"]) == ["1"]
    for trees in results["temperatures"].values():
        assert [each["tree"] for each in trees] == ["3/1/4", "2/2/4"]
        assert all(each["equal_to_plain"] == each["prompts"] == 2 and 1 <= each["accept_length"] <= 4 for each in trees)
    tables, printed = acceptance.tables(results), capsys.readouterr().out
    assert "relative to the chain" in tables["nodes"] and all(table in printed for table in tables.values())
    assert {"temperatures", "rules"} < set(tables)


def test_a_model_without_a_head_is_an_error(tiny, tmp_path):
    with pytest.raises(ValueError, match="measures a draft head"):
        acceptance.main([*tiny[:2], *tiny[4:], "--out", str(tmp_path / "out.jsonl")])
