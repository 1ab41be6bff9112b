"""Every wrong request gets a 4xx in OpenAI's shape that names the field; the `client` fixture checks that the server lives on."""

import gzip
import json
import re
import threading
import time
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from jaxspec.server import fields, neutral_fields
from jaxspec.server.app import Application
from jaxspec.server.messages.requests import MessagesRequest
from jaxspec.server.model import MAX_OTHER_NAMES, ServedModel
from jaxspec.server.openai.requests import ChatRequest, CompletionRequest
from jaxspec.server.responses.requests import ResponsesRequest
from jaxspec.server.settings import ServerSettings
from jaxspec.server.sglang.api import GenerateRequest
from tests.server.conftest import BODIES, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, USER, Client, served
from tests.server.fakes import CHAT_TEMPLATE, CONTEXT, TREE
from tests.server.wrong_fields import WRONG_FIELDS


def refusal(response: httpx.Response, status: int) -> dict:
    """The error object of a refusal, checked for its shape, and that it says nothing in pydantic's own words."""
    assert response.status_code == status, response.text
    body = response.json()
    assert not re.search(r"(List|String|Dictionary|Input|Value) (should|error)", response.text), response.text
    if response.url.path.startswith("/v1/messages"):
        assert (list(body), list(body["error"])[:2], body["type"]) == (["type", "error"], ["type", "message"], "error")
        assert len(body["error"]["message"]) < 600
        return body["error"]
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 600
    return error


@pytest.mark.parametrize(("path", "body", "field"), WRONG_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_the_message_names_the_wrong_field(client: Client, path: str, body: dict, field: str):
    error = refusal(client.post(path, **body), 400)
    assert error["param"] == field
    assert field in error["message"]
    assert len(client.engine.params) == len(client.engine.withdrawn)  # the engine has nothing of it


def test_neutral_values_of_what_is_not_there_yet_pass(client: Client):
    neutral = {"n": 1, "top_p": 1.0, "top_k": -1, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    assert client.post(COMPLETIONS, prompt="x", best_of=1, echo=False, logprobs=None, suffix=None, **neutral).status_code == 200
    chat = {"tools": [], "tool_choice": "none", "logprobs": False, "top_logprobs": 0, "store": False, "service_tier": "auto"}
    assert client.post(CHAT, messages=USER, **chat, **neutral).status_code == 200
    # What sglang.bench_serving sends:
    params = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True, "n": 1, "top_k": -1}
    body = {"sampling_params": params, "stream": False, "lora_path": None, "return_logprob": False, "logprob_start_len": -1}
    assert client.post(GENERATE, text="x", **body).status_code == 200


def test_true_is_not_a_neutral_one(client: Client):
    for spelt in (True, 1):
        assert refusal(client.post(CHAT, messages=USER, store=spelt), 400)["param"] == "store"
    assert refusal(client.post(CHAT, messages=USER, store=0), 400)["code"] == 400


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            {"messages": USER, "max_completion_tokens": 5, "min_tokens": 9},
            "min_tokens (9) must not be more than max_completion_tokens (5)",
        ),
        (
            GENERATE,
            {"text": "x", "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 9}},
            "sampling_params.min_new_tokens (9) must not be more than sampling_params.max_new_tokens (5)",
        ),
        (
            GENERATE,
            {"text": "x", "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}},
            "sampling_params.min_new_tokens (1) must not be more than sampling_params.max_new_tokens (0)",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 2},
            "min_tokens (2) must not be more than max_tokens (0)",
        ),
        (
            GENERATE,
            {"text": "x", "sampling_params": {"regex": "a", "ebnf": "root ::= a"}},
            "sampling_params.regex and sampling_params.ebnf can't be given together: a text follows one grammar",
        ),
        (COMPLETIONS, {"prompt": ["x"] * 128, "n": 3}, "n = 3 makes 384 completions of 128 prompts; a request takes at most 256"),
    ],
)
def test_messages_speak_of_the_clients_fields(client: Client, path: str, body: dict, message: str):
    assert refusal(client.post(path, **body), 400)["message"] == message


TOKENIZE = "/tokenize"
WITH_MODEL = [*BODIES.items(), (TOKENIZE, {"prompt": "x"})]


@pytest.mark.parametrize(("path", "body"), WITH_MODEL)
def test_other_names_of_models_are_answered_with_one_warning_each(client: Client, caplog, path: str, body: dict):
    """As SGLang does: what its pages show asks for the name of another checkpoint."""
    for _ in range(2):
        assert client.post(path, model=f"gpt of {path}", **body).status_code == 200
    assert client.post_text(path, json.dumps({"model": "\ud800", **body})).status_code == 200
    assert caplog.text.count(f'unknown model "gpt of {path}" requested; fake answers') == 1
    assert refusal(client.http.get("/v1/models/org/gpt-7"), 404)["code"] == "model_not_found"


def test_other_names_are_refused_if_the_owner_says_so():
    with served(template=CHAT_TEMPLATE, strict_name=True) as client:
        for path, body in WITH_MODEL:
            error = refusal(client.post(path, model="gpt-7", **body), 404)
            assert path == MESSAGES or (error["param"], error["code"]) == ("model", "model_not_found")
            assert "gpt-7" in error["message"] and "fake" in error["message"]


def test_warnings_about_names_end_some_time(caplog):
    model = ServedModel("fake", CONTEXT, TREE, None)
    for number in range(100):
        model.check_name(str(number))
    assert len(caplog.records) == MAX_OTHER_NAMES


ROUTERS = {
    "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
    "model": "x",
}  # fmt: skip
"""What sglang-router 0.3.2 writes into chat requests."""
ROUTERS_GENERATE = {
    "return_hidden_states": False, "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False,
    "return_entropy": False, "model": None, "sampling_params": None,
}  # fmt: skip
NEUTRAL = {
    COMPLETIONS: neutral_fields.OPENAI | neutral_fields.COMPLETION,
    CHAT: neutral_fields.OPENAI | neutral_fields.CHAT,
    GENERATE: neutral_fields.GENERATE,
    RESPONSES: neutral_fields.OPENAI | neutral_fields.RESPONSES,
    MESSAGES: neutral_fields.MESSAGES,
    TOKENIZE: neutral_fields.TOKENIZE,
}


@pytest.mark.parametrize("path", NEUTRAL)
def test_defaults_of_other_servers_pass_and_nothing_else(client: Client, path: str):
    """Routers write all of them into every request."""
    body, table = dict(WITH_MODEL)[path], NEUTRAL[path]
    assert client.post(path, **body, **dict.fromkeys(table)).status_code == 200
    assert client.post(path, **body, **{name: values[-1] if values else None for name, values in table.items()}).status_code == 200
    for name in table:
        error = refusal(client.post(path, **body, **{name: "something else"}), 400)
        assert error["message"].startswith(f"{name} is not supported yet (leave it out") and error.get("param", name) == name


def test_what_routers_add_passes(client: Client):
    assert client.post(CHAT, messages=USER, **ROUTERS).status_code == 200
    assert client.post(GENERATE, text="x", **ROUTERS_GENERATE).status_code == 200
    nulls = "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank ngram_corpus_id"
    for path in (COMPLETIONS, CHAT):
        assert client.post(path, **BODIES[path], **dict.fromkeys(nulls.split()), stream_interval=1).status_code == 200
    for interval in (None, 1):
        sampling = {"stream_interval": interval, "custom_params": None}
        assert client.post(GENERATE, text="x", lora_path="", sampling_params=sampling).status_code == 200
    nulls = "mm_processor_kwargs media_io_kwargs tool_choice reasoning_effort"
    assert client.post(TOKENIZE, messages=USER, **dict.fromkeys(nulls.split())).status_code == 200


def test_nulls_are_as_good_as_nothing(client: Client):
    models = (CompletionRequest, ChatRequest, GenerateRequest, ResponsesRequest, MessagesRequest)
    for (path, body), model in zip(BODIES.items(), models, strict=True):
        nulls = dict.fromkeys(set(model.model_fields) - set(body) - {"model"})
        assert client.post(path, **body, **nulls).status_code == 200


def test_tools_pass_only_where_they_are_not_to_be_used(client: Client):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert client.post(CHAT, messages=USER, tools=tools, tool_choice="none").status_code == 200
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        assert refusal(client.post(CHAT, messages=USER, tools=tools, **choice), 400)["param"] == "tools"


@pytest.mark.parametrize(
    ("path", "body", "field", "prompt_tokens"),
    [
        (COMPLETIONS, {"prompt": "x" * CONTEXT}, "prompt", CONTEXT),
        (COMPLETIONS, {"prompt": [1] * 1000, "stream": True}, "prompt", 1000),
        (COMPLETIONS, {"prompt": ["x", "x" * 70]}, "prompt.1", 70),
        (COMPLETIONS, {"prompt": "x" * 60, "max_tokens": 5}, "max_tokens", 60),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}, "messages", 207),
        (CHAT, {"messages": USER, "max_completion_tokens": 60}, "max_completion_tokens", 9),
        (RESPONSES, {"input": "x" * 200}, "input", 207),
        (RESPONSES, {"input": "hi", "max_output_tokens": 60}, "max_output_tokens", 9),
        (GENERATE, {"text": "x" * 99}, "text", 99),
        (GENERATE, {"input_ids": [1] * 5, "sampling_params": {"max_new_tokens": 60}}, "sampling_params.max_new_tokens", 5),
    ],
)
def test_more_than_the_context(client: Client, path: str, body: dict, field: str, prompt_tokens: int):
    error = refusal(client.post(path, **body), 400)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert field in error["message"] and str(CONTEXT) in error["message"] and f"{prompt_tokens} tokens" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "application/xml", None])
def test_other_content_types(client: Client, kind: str | None, path: str):
    request = client.http.build_request("POST", path, content=b'{"prompt": "x"}')
    if kind:
        request.headers["content-type"] = kind
    error = refusal(client.http.send(request), 415)
    assert error["param"] == "content-type" and "application/json" in error["message"]


def test_compressed_bodies(client: Client):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = client.http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert refusal(answer, 415)["message"] == 'send the body without Content-Encoding, got "gzip"'


def test_half_a_surrogate_pair(client: Client):
    """It is valid JSON but no character: no tokenizer takes it, and no answer can carry it."""
    for path, field in ((COMPLETIONS, "prompt"), (GENERATE, "text"), ("/tokenize", "prompt")):
        assert refusal(client.post_text(path, f'{{"{field}": ["a", "b\\ud800"]}}'), 400)["param"].startswith(field)
    for body in ('{"prompt": "x", "\\udfff": 1}', '{"prompt": "x", "top_p": "\\ud800"}'):
        response = client.post_text(COMPLETIONS, body)
        assert 400 <= response.status_code < 500
        assert "?" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": "z" * 5000}, {"z" * 5000: 1}, {f"{number}{'z' * 500}": 1 for number in range(20)},
        {name: "z" * 500 for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n", "stream", "echo")},
        {"prompt": ["z" * 500, 1]}, {"logit_bias": {"z" * 500: 1}}, {"speculative": {"z" * 500: "z" * 500}},
        {"stream": True, "stream_options": {f"{number}{'z' * 50}": 1 for number in range(20)}},
        {"structured_outputs": {"structural_tag": {"format": {"type": "any_text", "z" * 5000: 1}}}},
        {"guided_json": {"properties": {"z" * 5000: {"not": {}}}}}, {"guided_json": {"type": "z" * 5000}},
        {"regex": "(" + "z" * 5000},
    ],
    ids=lambda body: f"{next(iter(body))[:20]} and {len(body) - 1} more",
)  # fmt: skip
def test_200_characters_of_the_input_come_back(client: Client, body: dict):
    response = client.post(COMPLETIONS, **({"prompt": "x"} | body))
    assert refusal(response, 400)
    assert response.text.count("z") <= 200
    assert refusal(client.http.get(f"/{'z' * 5000}"), 404)["message"].count("z") <= 200


def test_many_errors_are_counted(client: Client):
    error = refusal(client.post(COMPLETIONS, prompt="x", **{f"field{number}": 1 for number in range(30)}), 400)
    assert "field9 " in error["message"] and "field10" not in error["message"] and "20 more" in error["message"]


def post_timed(client: Client, body: bytes) -> tuple[httpx.Response, float]:
    started = time.monotonic()
    return client.post_text(COMPLETIONS, body), time.monotonic() - started


MANY_FIELDS = b",".join(b'"%d": 0' % number for number in range(140_000))


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"-1.5," * 200_000 + b"0]}",
        b'{"prompt": "x", "stop": [' + b"7," * 250_000 + b"0]}",
        b"{" + MANY_FIELDS + b"}",
    ],
    ids=["wrong token ids", "wrong stop strings", "unknown fields"],
)
def test_a_body_full_of_errors_is_cheap(client: Client, body: bytes):
    """One message per item would take seconds."""
    fine, seconds = post_timed(client, b'{"prompt": "x", "metadata": {' + MANY_FIELDS + b"}}")
    assert fine.status_code == 200
    refused, more_seconds = post_timed(client, body)
    refusal(refused, 400)
    assert more_seconds < 1 + 4 * seconds


@pytest.mark.parametrize(
    ("kind", "wrong"), [(fields.Strings, [7] * 9), (fields.TokenIds, ["x"] * 9), (fields.ListsOfTokenIds, [["x"] * 9] * 9)]
)
def test_the_first_wrong_item_ends_the_check(kind: Any, wrong: list):
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind).validate_python(wrong, strict=True)
    assert error.value.error_count() == 1


def test_a_body_that_is_too_large(client: Client):
    with client.connect() as connection:  # refused before it is sent
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: 99999999\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")

    assert "2097152" in refusal(client.http.post(COMPLETIONS, content=b"x" * (2**21 + 1)), 413)["message"]

    def chunks():  # without a content-length
        for _ in range(17):
            yield b" " * 2**17

    assert "2097152" in refusal(client.post_text(COMPLETIONS, chunks()), 413)["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "hello world " * 2**16}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "hello world"}] * 2**14}, "messages"),
        (GENERATE, {"text": ["x", "hello world " * 2**16]}, "text.1"),
    ],
    ids=[COMPLETIONS, CHAT, GENERATE],
)
def test_megabytes_of_text_are_not_tokenized(client: Client, path: str, body: dict, field: str):
    started = time.process_time()
    error = refusal(client.post(path, **body), 400)
    assert time.process_time() - started < 5  # of CPU time; in full it takes half a minute
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"more than {16 * CONTEXT - 16} tokens" in error["message"]


def test_a_slash_at_the_end_is_redirected(client: Client):
    for path in ("/v1/models", "/health"):
        answer = client.http.get(f"{path}/?x=1")
        assert (answer.status_code, httpx.URL(answer.headers["location"]).raw_path) == (307, f"{path}?x=1".encode())


def test_no_such_endpoint(client: Client):
    assert "/v2/completions" in refusal(client.http.get("/v2/completions"), 404)["message"]
    error = refusal(client.http.get(COMPLETIONS), 405)
    assert COMPLETIONS in error["message"] and "GET" in error["message"]
    assert client.http.get(COMPLETIONS).headers["allow"] == "POST"
    assert client.http.put("/flush_cache").headers["allow"] == "GET, POST"


def test_the_document_is_not_built_in_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    built_in = []
    monkeypatch.setattr(Application, "openapi", lambda _: built_in.append(threading.current_thread().name) or {})
    with served() as client:
        assert client.http.get(COMPLETIONS).status_code == 405 and not built_in
        assert client.http.get("/openapi.json").json() == {}
    assert "worker" in built_in[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil"}, {"origin": "null"}, {"origin": "http://["}, {"referer": "http://evil/page"},
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": "http://{host}"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", COMPLETIONS), ("POST", "/")]
)
def test_pages_of_other_origins_have_no_effect(client: Client, method: str, path: str, headers: dict):
    """They can send such requests without asking: images, links, forms, and text/plain."""
    flushes = client.engine.flushes
    given = {name: value.format(host=client.http.base_url.netloc.decode()) for name, value in headers.items()}
    response = client.http.request(method, path, headers={"content-type": "text/plain", **given}, content=b'{"prompt": "x"}')
    assert "another origin" in refusal(response, 403)["message"]
    assert (client.engine.flushes, client.engine.params) == (flushes, [])


def test_a_page_may_link_to_ours_and_ours_may_do_everything(client: Client):
    from_elsewhere = {"sec-fetch-site": "cross-site", "referer": "http://elsewhere/"}
    assert {client.http.get(path, headers=from_elsewhere).status_code for path in ("/", "/health")} == {200}
    host = client.http.base_url.netloc.decode()
    for ours in (
        {"origin": f"http://{host}"},
        {"sec-fetch-site": "same-origin", "origin": "https://name-of-a-proxy"},
        {"sec-fetch-site": "none"},
    ):
        assert client.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=ours).status_code == 200


def test_pages_of_allowed_origins_may_do_everything_and_others_nothing():
    friend = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    settings = ServerSettings(api_key="key", allowed_origins=("https://chat.example",))
    with served(settings) as client:
        permission = client.http.options(COMPLETIONS, headers=friend | asks)
        assert permission.status_code == 200 and permission.headers["access-control-allow-origin"] == friend["origin"]
        assert "authorization" in permission.headers["access-control-allow-headers"]
        for key, status in (("key", 200), ("wrong", 401)):
            headers = friend | {"authorization": f"Bearer {key}"}
            answer = client.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=headers)
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == friend["origin"]
        stranger = friend | {"origin": "https://chat.example.evil"}
        assert "access-control-allow-origin" not in client.http.options(COMPLETIONS, headers=stranger | asks).headers
        refused = client.http.post(COMPLETIONS, json={"prompt": "x"}, headers=stranger | {"authorization": "Bearer key"})
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers


def test_other_origins_get_no_permission(client: Client):
    response = client.http.options(COMPLETIONS, headers={"origin": "http://evil", "access-control-request-method": "POST"})
    assert refusal(response, 403)
    assert not [name for name in response.headers if name.startswith("access-control")]
