"""Flushing the cache and ending requests: the shapes of both. What ends, test_running.py tells."""

import pytest

from tests.server.conftest import Client
from tests.server.test_bad_input import refusal


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("query", ["", "?timeout=0", "?timeout=30.5", "?timeout=3600"])
def test_flushing_the_cache(client: Client, method: str, query: str):
    before = client.engine.flushes
    response = client.http.request(method, f"/flush_cache{query}")
    assert (response.status_code, response.text) == (200, "Cache flushed.\n")
    assert response.headers["content-type"].startswith("text/plain")
    assert client.engine.flushes == before + 1


@pytest.mark.parametrize("timeout", ["-1", "3601", "soon", "nan", "inf", "", "1e999"])
def test_what_is_no_timeout(client: Client, timeout: str):
    assert refusal(client.http.post(f"/flush_cache?timeout={timeout}"), 400)["param"] == "timeout"


def test_other_methods_are_told_which_there_are(client: Client):
    response = client.http.put("/flush_cache")
    assert refusal(response, 405) and response.headers["allow"] == "GET, POST"


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "rid"), ({"abort_all": False}, "rid"), ({"abort_all": 1}, "abort_all"), ({"abort_message": "x"}, "abort_message")],
)
def test_what_is_no_abortion(client: Client, body: dict, field: str):
    assert refusal(client.post("/abort_request", **body), 400)["param"] == field


def test_ending_what_is_not_there(client: Client):
    assert client.post("/abort_request", rid="nothing").json() == {"aborted": 0}
    assert client.post("/abort_request", abort_all=True).json() == {"aborted": 0}
    assert client.http.post("/abort_request", content=b'{"rid": "x"}').status_code == 415
