"""Random events: no page is lost and every request ends once. `python -m tests.engine.events` has 100,000."""

import logging

import pytest

from jaxspec.engine.pages import PrefixCache
from tests.engine.events import Life, live
from tests.sets import exhaustive


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "jaxspec")


@pytest.mark.variants
@pytest.mark.parametrize(
    ("source", "events"),
    [("EAGLE-3 and shared n-grams, adaptive", 300), *(exhaustive(each, 1000) for each in ("DSpark", "nothing"))],
)
def test_no_page_is_lost_and_every_request_ends(source, events):
    counts = live(0, 2, events, source).counts
    assert counts["add"] > events / 8 and counts["compared"] == 12 and counts["deliveries"] > events / 10
    assert {name for name in counts if name.startswith("ended: ")} >= {"ended: stop", "ended: abort", "ended: length"}


@pytest.mark.exhaustive
def test_a_lost_page_is_found(monkeypatch):
    """An engine that forgets to give pages back."""
    life = Life(2, 0, "n-grams")
    monkeypatch.setattr(PrefixCache, "release", lambda *_arguments: None)
    with pytest.raises(Exception, match="page"):
        for _ in range(300):
            life.happen()
