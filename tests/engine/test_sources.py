"""Random requests say the same through every source of drafts as in plain decoding. `python -m tests.engine.sources` has more."""

import pytest

from tests.engine import sources
from tests.engine.sources import SOURCES, Source, check, random_group
from tests.sets import exhaustive

SOME = ("n-grams beside plain decoding", "EAGLE-3 for some levels and n-grams", "DFlash", "the target itself")
"""One of each kind."""
UNSURE = ("nothing", "n-grams beside plain decoding")
"""They may draft nothing."""


@pytest.mark.variants
@pytest.mark.parametrize("source", [*SOME, *(exhaustive(name) for name in SOURCES if name not in SOME)])
def test_what_is_said_does_not_depend_on_the_source_of_drafts(source):
    outcome = check(*random_group(list(SOURCES).index(source), seed=2, count=25, source=source, placement="one device"))
    assert outcome.unequal == []
    assert outcome.requests > 25 and outcome.counts["tokens"] > 250 and (outcome.counts["drafted"] or source in UNSURE)


@pytest.mark.exhaustive
def test_a_source_that_changes_what_is_said_is_found(monkeypatch):
    options = {"accept_threshold_single": 0.01, "accept_threshold_acc": 0.1, "row_cost": None}
    lossy = Source("EAGLE-3", "3/2/5", sources.eagle3, options)
    monkeypatch.setitem(SOURCES, "lossy", lossy)
    assert check(*random_group(0, seed=2, count=25, source="lossy", placement="one device")).unequal
