"""x-request-id: every answer has one, the client's if it sent one."""

import httpx
import pytest

from tests.server.conftest import Client
from tests.server.test_bad_input import refusal

PATHS = [("GET", "/health"), ("GET", "/no/such/endpoint"), ("PUT", "/health"), ("POST", "/v1/completions"), ("GET", "/")]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("given", ["a", "req-7_x.y:z", "two words", "x" * 128])
def test_it_is_repeated(client: Client, method: str, path: str, given: str):
    response = client.http.request(method, path, headers={"x-request-id": given})
    assert response.headers.get_list("x-request-id") == [given]


def test_one_is_made_up(client: Client):
    ids = [client.http.get("/health").headers["x-request-id"] for _ in range(3)]
    assert len(set(ids)) == 3 and all(len(each) == 32 for each in ids)


@pytest.mark.parametrize("given", [b"x" * 129, "ü".encode(), b"\xff", b"a\tb"])
def test_others_are_refused(client: Client, given: bytes):
    response = client.http.get("/health", headers={"x-request-id": given})
    assert refusal(response, 400)["param"] == "x-request-id"
    [made_up] = response.headers.get_list("x-request-id")
    assert made_up.encode() != given


def test_streams_have_one(client: Client):
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    response = client.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (200, "mine")


def test_errors_of_every_layer_have_one(client: Client):
    """Also those that come from outside of the routes."""
    headers = {"x-request-id": "mine", "content-type": "application/json"}
    answers: list[httpx.Response] = [client.http.post("/generate", content=b"x" * 17 * 2**20, headers=headers)]
    answers.append(client.http.post("/generate", content=b"{", headers=headers))
    client.engine.failures = 1
    answers.append(client.http.post("/generate", json={"text": "x"}, headers=headers))
    client.engine.room = 0
    answers.append(client.http.post("/generate", json={"text": "x"}, headers=headers))
    assert [answer.status_code for answer in answers] == [413, 400, 500, 503]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
