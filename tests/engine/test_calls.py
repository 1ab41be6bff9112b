"""Python calls are host time, and the host must keep up with the device: there must not be more of them."""

import pytest

from tests.engine.calls import COUNTED, MOST


@pytest.mark.parametrize("name", list(MOST))
def test_no_more_python_calls_than(name: str):
    calls = min((COUNTED[name]() for _ in range(3)), key=lambda each: each.total())  # how threads take turns adds some
    assert calls.total() <= MOST[name], calls.most_common(20)
