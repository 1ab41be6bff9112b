"""Bodies that are hostile to parsers, and how little of them comes back."""

import math
import time

import pytest

from jaxspec.commands.options import FLAG_OF
from jaxspec.server.errors import FLAGS, MAX_ECHO, echo
from tests.server.conftest import BODIES, Client, wait_until
from tests.server.test_bad_input import refusal

PATHS = [*BODIES, "/tokenize", "/detokenize", "/abort_request", "/v1/messages/count_tokens"]
FIELDS = "prompt text messages tokens rid temperature metadata sampling_params tools stop input x"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"hello", "JSON"),
        (b"{'prompt': 'x'}", "JSON"),
        (b"[1]", "JSON object"),
        (b"5", "JSON object"),
        (b"null", "JSON object"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body"),
        (b"[" * 200_000, "body"),
        (b'{"a":' * 200_000, "body"),
        (b"[" * 200_000 + b"]" * 200_000, "body"),
        (b'{"prompt": ' + b"[" * 200_000, "body"),
        (b"\xff" * 10**6, "body"),
        (b"1" * 10**6, "body"),
        (b"-" * 10**6, "body"),
        (b'"' + b"\\u0000" * 10**5, "body"),
        (b'{"\\ud800": 1}', ""),
        (b"\xef\xbb\xbf{}", ""),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_what_is_no_json_object_is_told_at_once(client: Client, path: str, body: bytes, said: str):
    started = time.process_time()  # the server is in this process; a busy machine is not its fault
    assert said in refusal(client.post_text(path, body), 400)["message"]
    assert time.process_time() - started < 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [10, 500, 990, 2000, 5000, 50_000])
def test_nesting_at_any_depth(client: Client, path: str, depth: int):
    """Whatever of the parser, the checks and the message gives up first."""
    for field in FIELDS.split():
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            response = client.post_text(path, f'{{"{field}": {opening * depth}1{closing * depth}}}')
            assert len(refusal(response, 400)["message"]) < 600


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" * 4000, "1" * 5000, "0." + "1" * 5000, "1e-400", "-0"]
)
@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "n", "max_tokens", "priority", "min_p", "top_k"])
def test_numbers_of_any_size(client: Client, field: str, number: str):
    response = client.post_text("/v1/completions", f'{{"prompt": "x", "{field}": {number}}}')
    assert response.status_code == 400 if not math.isfinite(float(number)) else response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert refusal(response, 400)["param"] == (None if len(number) == 5000 else field)


def test_of_duplicate_keys_the_last_one_counts(client: Client):
    answer = client.post_text("/v1/completions", '{"prompt": "x", "max_tokens": 5, "max_tokens": 3}').json()
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, {"a": {3}}, "ü" * 500, [[0] * 500], object()])
def test_values_are_shown_cut(value):
    assert 0 < len(echo(value)) <= MAX_ECHO


def test_what_is_nested_deeply_is_shown_in_part():
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert echo(value) == "[" * (MAX_ECHO - 3) + "..."


def test_an_error_of_ours_tells_nothing(client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fail(*_):
        raise RuntimeError("secret: /home/someone")

    monkeypatch.setattr("jaxspec.server.tokenize_api.tokenize_request", fail)
    response = client.http.post("/tokenize", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.headers["connection"] == "close"
    assert response.json()["error"] == {"message": "internal server error", "type": "server_error", "param": None, "code": 500}
    wait_until(lambda: "secret" in caplog.text)  # it is written when the answer is out


def test_settings_have_the_flags_of_the_command():
    assert {name: FLAG_OF[name] for name in FLAGS} == FLAGS
