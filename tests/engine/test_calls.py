"""Python calls are host time, and the host must keep up with the device: there must not be more of them."""

import pytest

from tests.engine.calls import COUNTED, MOST


@pytest.mark.variants
@pytest.mark.parametrize("name", list(MOST))
def test_no_more_python_calls_than(name: str):
    for _ in range(3):  # threads that take turns otherwise add some
        calls = COUNTED[name]()
        if calls.total() <= MOST[name]:
            return
    raise AssertionError(f"{calls.total()} calls, at most {MOST[name]}: {calls.most_common(20)}")
