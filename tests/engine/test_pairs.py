"""Every feature with every other: the table of docs/pairs.md is what was served, and the rest is refused by name."""

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.pairs import RECORD, REFUSED, as_markdown, go_together, random_triples, served, sets_of
from tests.engine.records import recorded
from tests.engine.sources import check, random_group

ROOT = Path(__file__).parents[2]


def test_every_pair_was_served_or_is_refused():
    table = "\n".join(as_markdown(recorded(RECORD)))
    assert table in (ROOT / "docs/pairs.md").read_text()
    assert "?" not in table and not sets_of(2)[0] - {"16 bits", "8-bit cache"}


@pytest.mark.parametrize("pair", REFUSED, ids=", ".join)
def test_what_can_not_be_together_is_refused_by_name(pair):
    ask, words = REFUSED[pair]
    with pytest.raises(ValueError, match=re.escape(words)):
        ask()


def test_a_pair_counts_if_one_request_had_both_and_all_of_its_group_were_equal():
    line = {"features": ["EAGLE", "serial"], "has": [["tools"], ["preemption"]], "counts": {"drafted": 3}}
    pairs = {frozenset(each) for each in (("EAGLE", "serial"), ("EAGLE", "tools"), ("serial", "tools"))}
    pairs |= {frozenset(each) for each in (("EAGLE", "preemption"), ("serial", "preemption"))}
    assert served([line], 2).keys() == pairs
    for counts in ({"drafted": 3, "unequal": 1}, {}):
        assert not served([{**line, "counts": counts}], 2)
    assert go_together({"grammar", "tools", "int8"}) and not go_together({"grammar", "no constraint"})
    assert random_triples(1, 50) == random_triples(1, 60)[:50]


@pytest.mark.exhaustive
def test_random_triples(tmp_path):
    """300, other ones each day; the groups that serve the most of them, as many as ten minutes have."""
    seed = str(datetime.date.today().toordinal())
    command = [sys.executable, "-m", "tests.engine.pairs", "--triples", "300", "--seed", seed, "--groups-seed", seed, "--most", "6"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    assert len(served(recorded(tmp_path / "out"), 3)) > 300


@pytest.mark.exhaustive
def test_two_processes_say_what_one_says():
    """Greedy, sampled and constrained texts; every launch goes through a message."""
    outcome = check(*random_group(3, seed=2, count=16, source="EAGLE-3 and n-grams", placement="two processes"))
    assert outcome.unequal == [] and outcome.counts["drafted"]
