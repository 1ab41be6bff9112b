"""Names, keys and body limits: what every request passes before a route sees it."""

from collections.abc import Iterator

import httpx
import pytest

from jaxspec.server.middleware import PUBLIC
from jaxspec.server.settings import ServerSettings
from tests.server.conftest import Client, served
from tests.server.test_bad_input import refusal

# Keys

KEY, ADMIN = "sk-ünicode key", "sk-admin"
PROMPT = {"prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def one_key() -> Iterator[httpx.Client]:
    with served(ServerSettings(api_key=KEY, shown={"page_size": 16})) as client:
        yield client.http


@pytest.fixture(scope="module")
def two_keys() -> Iterator[httpx.Client]:
    with served(ServerSettings(api_key=KEY, admin_api_key=ADMIN, shown={"log_level": "info"})) as client:
        yield client.http


def bearer(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"authorization": f"{scheme} {key}".strip().encode()}


def key_refusal(response: httpx.Response) -> dict:
    """The error, checked for what openai-python and browsers need."""
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert KEY not in response.text
    return error


@pytest.mark.parametrize("headers", [bearer(KEY), bearer(KEY, "bearer"), bearer(f" {KEY}"), {"x-api-key": KEY.encode()}])
def test_the_key_opens_everything(one_key: httpx.Client, headers):
    assert one_key.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
    assert one_key.get("/v1/models", headers=headers).status_code == 200
    assert one_key.post("/flush_cache", headers=headers).status_code == 200  # without an admin key this one is enough
    assert one_key.get("/server_info", headers=headers).json()["page_size"] == 16


WRONG = [{}, {"x-api-key": ""}, *map(bearer, ("", "sk-unicode key", KEY[:-1], KEY + "x")), bearer(KEY, "Basic"), bearer(KEY, "")]


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/server_info", "/tokenizer_info", "/openapi.json", "/no/such/endpoint", "/healthy"]
)
def test_other_keys_are_refused(one_key: httpx.Client, path: str, headers):
    key_refusal(one_key.get(path, headers=headers))


def test_clients_that_are_made_from_the_document_know_of_the_key(one_key: httpx.Client, shared: Client):
    document = one_key.get("/openapi.json", headers=bearer(KEY)).json()
    [name] = document["security"][0]
    assert document["components"]["securitySchemes"][name] == {"type": "http", "scheme": "bearer"}
    assert "security" not in shared.http.get("/openapi.json").json()


def test_missing_and_wrong_keys_are_told_apart(one_key: httpx.Client):
    assert "asks for" in key_refusal(one_key.get("/v1/models"))["message"]
    assert "wrong" in key_refusal(one_key.get("/v1/models", headers=bearer("x")))["message"]


def test_bodies_are_not_read_without_a_key(one_key: httpx.Client):
    key_refusal(one_key.post("/v1/completions", content=b"x" * 17 * 2**20))  # more than a body may have, and no JSON


@pytest.mark.parametrize("path", sorted(PUBLIC))
def test_what_needs_no_key(one_key: httpx.Client, path: str):
    assert one_key.get(path).status_code == 200


def test_a_server_without_keys_ignores_them():
    """lm-eval sends an empty one if it has none."""
    with served() as client:
        for headers in WRONG:
            assert client.http.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
            assert client.http.post("/flush_cache", headers=headers).status_code == 200


def test_what_only_the_owner_may_do(two_keys: httpx.Client):
    for headers, is_admin in ((bearer(KEY), False), (bearer(ADMIN), True)):
        assert two_keys.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
        assert two_keys.post("/abort_request", json={"rid": "nothing"}, headers=headers).json() == {"aborted": 0}
        info = two_keys.get("/server_info", headers=headers).json()
        assert ("log_level" in info) is is_admin and info["served_model_name"] == "fake"
        owners = [
            two_keys.get("/flush_cache", headers=headers),
            two_keys.post("/flush_cache", headers=headers),
            two_keys.post("/abort_request", json={"abort_all": True}, headers=headers),
        ]
        for response in owners:
            if is_admin:
                assert response.status_code == 200
            else:
                assert "admin" in key_refusal(response)["message"]


def test_an_admin_key_alone_leaves_the_rest_open():
    with served(ServerSettings(admin_api_key=ADMIN)) as client:
        assert client.http.post("/v1/completions", json=PROMPT).status_code == 200
        assert client.http.get("/server_info").status_code == 200
        key_refusal(client.http.post("/flush_cache"))
        assert client.http.post("/flush_cache", headers=bearer(ADMIN)).status_code == 200


def test_every_key_takes_the_same_comparisons(two_keys: httpx.Client, monkeypatch):
    """Of digests and in constant time, so that nobody can measure how much of a key was right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    counts = set()
    for key in (KEY, ADMIN, KEY[:-1], "x"):
        compared.clear()
        two_keys.get("/v1/models", headers=bearer(key))
        assert all(len(one) == len(other) == 32 for one, other in compared)
        counts.add(len(compared))
    assert len(counts) == 1 and counts.pop() >= 2


@pytest.mark.parametrize("keys", [{"api_key": ""}, {"api_key": "x", "admin_api_key": ""}])
def test_an_empty_key_is_refused(keys: dict):
    with pytest.raises(ValueError, match="must not be empty"):
        ServerSettings(**keys)


# Names

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
