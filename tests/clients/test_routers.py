"""Routers over two servers, of which one is killed: only streams that were in flight are lost."""

import pytest

from tests.clients.failover import REQUESTS, run


@pytest.mark.parametrize("router", ["sglang_router", "smg"])
def test_the_death_of_a_server_costs_streams_in_flight_only(router, client, tmp_path):
    result = run(router, client(router, "python"), tmp_path)
    assert result.whole == result.streams == REQUESTS // 2 and result.killed_had >= 1 / 3
    assert result.whole_answered == result.whole, result.problems
    assert result.streams_lost_elsewhere == 0, result.problems
    assert result.streams - result.streams_finished <= result.streams_open
