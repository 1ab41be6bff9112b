"""Requests have names, by which clients can abort them."""

import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import httpx
import pytest

from jaxspec.server.settings import ServerSettings
from tests.server.conftest import CHAT, COMPLETIONS, GENERATE, Client, asking, served, wait_until
from tests.server.fakes import TEXT
from tests.server.test_bad_input import refusal

LONG = 55
NAME = {COMPLETIONS: "request_id", CHAT: "request_id", GENERATE: "rid"}


@contextmanager
def standing(client: Client, path: str, headers: dict | None = None, requests: int = 1, **fields) -> Iterator[list[httpx.Response]]:
    """A request that has brought some tokens when the engine stands still. The list has its answer afterwards."""
    answers: list[httpx.Response] = []
    body = asking(path, LONG) | fields
    before = client.engine.running
    thread = threading.Thread(target=lambda: answers.append(client.http.post(path, json=body, headers=headers)))
    client.engine.allow(0)
    thread.start()
    wait_until(lambda: client.engine.running == before + requests or bool(client.engine.allow(1)))
    client.engine.allow(1)
    yield answers
    client.engine.allow(math.inf)
    thread.join(20)


def abort(client: Client, **body) -> int:
    """How many completions it ended. The engine takes commands between two steps, so it is allowed some."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/abort_request", **body)
        while not wait([answer], 0.05).done:
            client.engine.allow(1)
    response = answer.result()
    assert response.status_code == 200, response.text
    return response.json()["aborted"]


def text_of(answer: dict) -> tuple[str, str]:
    """Of the only completion: text and why it ended."""
    if "choices" not in answer:
        return answer["text"], answer["meta_info"]["finish_reason"]["type"]
    [choice] = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("path", NAME)
@pytest.mark.parametrize("by", ["body", "header"])
def test_the_client_gets_what_there_is(client: Client, path: str, by: str):
    fields = {NAME[path]: "mine"} if by == "body" else {}
    headers = {"x-request-id": "mine"} if by == "header" else None
    with standing(client, path, headers, **fields) as answers:
        assert abort(client, rid="mine", abort_all=False) == 1
    text, reason = text_of(answers[0].json())
    assert (answers[0].status_code, reason) == (200, "abort")
    assert 0 < len(text) < LONG - 2 and TEXT.startswith(text)
    assert abort(client, rid="mine") == 0  # by now nothing has the name


@pytest.mark.parametrize("path", NAME)
def test_streams_end_in_order(client: Client, path: str):
    with standing(client, path, stream=True, **{NAME[path]: "mine"}) as answers:
        assert abort(client, rid="mine") == 1
    *_, last, done, _ = answers[0].text.split("\n\n")
    assert done == "data: [DONE]"
    reason = json.loads(last.removeprefix("data: "))
    said = reason["choices"][0]["finish_reason"] if "choices" in reason else reason["meta_info"]["finish_reason"]["type"]
    assert "abort" in said


def test_scoring_that_was_aborted_says_so(client: Client):
    client.engine.ends_with = "abort"
    assert text_of(client.post(COMPLETIONS, prompt="hello", echo=True, max_tokens=0).json()) == ("hello", "abort")


def test_names_that_the_server_made_up(client: Client):
    """They are in the header of a stream's answer."""
    client.engine.allow(1)
    with client.http.stream("POST", "/generate", json=asking(GENERATE, LONG) | {"stream": True}) as response:
        name = response.headers["x-request-id"]
        assert abort(client, rid=name) == 1
        client.engine.allow(math.inf)
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line and "[DONE]" not in line]
    assert events[-1]["meta_info"]["id"] == name
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_only_what_has_the_name_ends(client: Client):
    with standing(client, "/generate", rid="a") as first, standing(client, "/generate", rid="b") as second:
        for name in ("c", "a-0", "A", "ab"):
            assert abort(client, rid=name) == 0
        assert abort(client, rid=["a", "c"]) == 1
    assert text_of(first[0].json())[1] == "abort"
    assert text_of(second[0].json())[1] == "length"


def test_all_completions_of_a_request_end(client: Client):
    prompts, n = ["one", "three"], 3
    params = {"max_new_tokens": LONG, "n": n}
    with standing(client, "/generate", requests=6, text=prompts, sampling_params=params, rid="mine") as answers:
        assert abort(client, rid="mine") == 6
    meta = [answer["meta_info"] for answer in answers[0].json()]
    assert [each["id"] for each in meta] == [f"mine-{number}" for number in range(6)]
    assert {each["finish_reason"]["type"] for each in meta} == {"abort"}


def test_each_prompt_may_have_a_name(client: Client):
    params = {"max_new_tokens": LONG, "n": 2}
    with standing(client, "/generate", requests=4, text=["one", "three"], sampling_params=params, rid=["a", "b"]) as answers:
        assert abort(client, rid="b") == 2
    meta = [answer["meta_info"] for answer in answers[0].json()]
    assert [each["id"] for each in meta] == ["a-0", "a-1", "b-0", "b-1"]
    assert [each["finish_reason"]["type"] for each in meta] == ["length", "length", "abort", "abort"]


@pytest.mark.parametrize("path", NAME)
def test_a_name_in_use_is_refused(client: Client, path: str):
    with standing(client, "/generate", rid="mine") as answers:
        error = refusal(client.post(path, **asking(path, LONG), **{NAME[path]: "mine"}), 400)
        assert error["param"] == NAME[path] and "in use" in error["message"]
    assert text_of(answers[0].json())[1] == "length"
    assert client.post(path, **asking(path, LONG), **{NAME[path]: "mine"}).status_code == 200  # it is free again


@pytest.mark.parametrize("asked", [{"abort_all": True}, {"rid": "trace"}], ids=["all", "those of a header"])
def test_several_can_be_ended(client: Client, asked: dict):
    """Proxies repeat a header when they try again: its name stands for both."""
    headers = {"x-request-id": "trace"}
    with standing(client, "/generate", headers) as first, standing(client, "/v1/completions", headers) as second:
        assert abort(client, **asked) == 2
    assert [text_of(answers[0].json())[1] for answers in (first, second)] == ["abort", "abort"]


@pytest.mark.parametrize("stream", [False, True])
def test_names_are_free_after_failures(client: Client, stream: bool):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3}, "rid": "mine", "stream": stream}
    client.engine.failures = 1
    assert client.post("/generate", **body).status_code == 500
    client.engine.room = 0
    assert client.post("/generate", **body).status_code == 503
    client.engine.room = 9
    assert client.post("/generate", **body | {"text": None, "input_ids": [999]}).status_code == 400
    assert client.post("/generate", **body).status_code == 200


def test_names_are_free_after_hanging_up(client: Client):
    client.engine.allow(1)
    with client.http.stream("POST", "/generate", json={"text": "hello", "rid": "mine", "stream": True}) as response:
        assert next(response.iter_lines())
    client.engine.allow(math.inf)
    wait_until(lambda: client.post("/generate", text="x", rid="mine", sampling_params={"max_new_tokens": 1}).status_code == 200)


@pytest.mark.parametrize("rid", ["", "x" * 129, "ü", "a\nb", 7, [], ["a", ""], ["a", 7], {"a": 1}])
def test_what_is_no_name(client: Client, rid):
    assert refusal(client.post("/generate", text="x", rid=rid), 400)["param"] == "rid"
    assert refusal(client.post("/abort_request", rid=rid), 400)["param"] == "rid"


@pytest.mark.parametrize("rid", [["a"], ["a", "a"], ["a", "b", "c"], ["a", "b", "b"]])
def test_there_must_be_a_name_for_each_prompt(client: Client, rid: list[str]):
    error = refusal(client.post("/generate", text=["x", "y"], rid=rid), 400)
    assert error["param"] == "rid" and "each of the 2 prompts" in error["message"]


def test_openai_has_no_lists_of_names(client: Client):
    assert refusal(client.post("/v1/completions", prompt=["x"], request_id=["a"]), 400)["param"] == "request_id"


@pytest.mark.parametrize("seconds", [None, 2.5])
def test_every_request_has_the_owners_deadline(seconds: float | None):
    with served(ServerSettings(request_timeout=seconds)) as client:
        for path, body in (("/v1/completions", {"prompt": ["x", "y"]}), ("/generate", {"text": "x"})):
            assert client.post(path, **body).status_code == 200
    assert client.engine.timeouts == [seconds] * 3
