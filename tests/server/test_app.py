"""The document at /openapi.json: every endpoint, every status, and responses that are as it says."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from jaxspec.server import sending, tokenize_api
from jaxspec.server.messages.answers import MessagesEvent, MessagesResponse, TokenCounted
from jaxspec.server.openai.api import ModelCard, ModelList
from jaxspec.server.openai.chat import ChatEvent, ChatResponse
from jaxspec.server.openai.completions import CompletionEvent, CompletionResponse
from jaxspec.server.responses.objects import ResponsesEvent, ResponsesResponse
from jaxspec.server.sglang.api import GenerateEvent, GenerateResponse
from jaxspec.server.sglang.info import AbortResponse, HealthResponse, LoadsResponse, ModelInfo, ServerInfo, VersionResponse
from tests.server.conftest import BODIES, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, USER, Client

ENDPOINTS = {
    "/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions", "/generate",
    "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/tokenizer_info",
    "/health", "/health_generate", "/ready", "/ping", "/metrics", "/version", "/v1/loads", "/loads", "/get_load",
    "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/flush_cache", "/abort_request",
}  # fmt: skip


@pytest.fixture(scope="module")
def document(shared: Client) -> dict[str, Any]:
    return shared.http.get("/openapi.json").json()


def operations(document: dict[str, Any]) -> dict[str, dict]:
    return {f"{method} {path}": one for path, methods in document["paths"].items() for method, one in methods.items()}


def test_it_names_every_endpoint(document: dict[str, Any]):
    assert set(document["paths"]) == ENDPOINTS
    assert document["info"]["title"] == "jaxspec" and document["info"]["version"] and document["info"]["description"]


def test_it_knows_every_failure(document: dict[str, Any]):
    for name, operation in operations(document).items():
        statuses = set(operation["responses"])
        assert statuses >= {"200", "400", "401", "405", "408", "413", "500", "503"}, name
        assert "422" not in statuses
        assert ("415" in statuses) == ("requestBody" in operation), name
        for status, response in operation["responses"].items():
            if status != "200":
                shape = "AnthropicErrorResponse" if " /v1/messages" in name else "ErrorResponse"
                assert response["content"] == {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    assert not {"HTTPValidationError", "ValidationError"} & set(document["components"]["schemas"])


@pytest.mark.parametrize("path", BODIES)
def test_it_tells_of_streams_and_deadlines(document: dict[str, Any], path: str):
    responses = document["paths"][path]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"404", "504"} <= set(responses)


def test_fields_are_explained(document: dict[str, Any]):
    """By the docstrings in the source."""
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["prompt"] and "served model" in fields["model"]["description"]
    assert fields["suffix"]["enum"] == [None, ""]


def test_operation_ids_are_unique(document: dict[str, Any]):
    ids = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(ids)) == len(ids)


SPOKEN = {"max_tokens": 9}
ASKED = {"input": "x", "top_logprobs": 1}
SAID = {"messages": USER, "max_tokens": 9}
NATIVE = {"text": "x", "sampling_params": {"max_new_tokens": 9}}


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        (CompletionResponse, "/v1/completions", {"prompt": "x", **SPOKEN}),
        (CompletionResponse, "/v1/completions", {"prompt": "xy", "logprobs": 2, "echo": True, **SPOKEN}),
        (ChatResponse, "/v1/chat/completions", {"messages": USER, **SPOKEN}),
        (ChatResponse, "/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 1}),
        (GenerateResponse, "/generate", NATIVE),
        (list[GenerateResponse], "/generate", {**NATIVE, "text": ["x", "y"]}),
        (ResponsesResponse, "/v1/responses", {**ASKED, "max_output_tokens": 9}),
        (MessagesResponse, "/v1/messages", SAID),
        (TokenCounted, "/v1/messages/count_tokens", {"messages": USER}),
        (sending.AnthropicErrorResponse, "/v1/messages", {**SAID, "n": 1}),
        (tokenize_api.TokenizeResponse, "/tokenize", {"prompt": "x", "return_token_strs": True}),
        (tokenize_api.DetokenizeResponse, "/detokenize", {"tokens": [[97]]}),
        (AbortResponse, "/abort_request", {"rid": "x"}),
        (tokenize_api.TokenizerInfo, "/tokenizer_info", None),
        (HealthResponse, "/health", None),
        (VersionResponse, "/version", None),
        (ModelInfo, "/model_info", None),
        (ServerInfo, "/server_info", None),
        (LoadsResponse, "/loads", None),
        (ModelList, "/v1/models", None),
        (ModelCard, "/v1/models/fake", None),
        (sending.ErrorResponse, "/v1/models/other", None),
    ],
)
def test_responses_are_as_documented(client: Client, model: Any, path: str, body: dict | None):
    response = client.http.get(path) if body is None else client.post(path, **body)
    assert not undocumented(TypeAdapter(model).validate_json(response.content, strict=True))


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        (CompletionEvent, COMPLETIONS, {"prompt": "x", "logprobs": 1, **SPOKEN}),
        (ChatEvent, CHAT, {"messages": USER, "logprobs": True, **SPOKEN}),
        (GenerateEvent, GENERATE, {**NATIVE, "return_logprob": True}),
        (ResponsesEvent, RESPONSES, ASKED),
        (MessagesEvent, MESSAGES, SAID),
    ],
    ids=BODIES,
)
def test_events_have_no_other_fields(client: Client, model: Any, path: str, body: dict):
    options: dict[str, Any] = {} if path in (RESPONSES, MESSAGES) else {"speculative": {"trace": True}}
    if path in (COMPLETIONS, CHAT):
        options |= {"stream_options": {"include_usage": True}, "return_token_ids": True, "return_spec_tokens_details": True}
    *events, last = client.events(path, **body, **options)
    assert events
    whole = GenerateResponse if path == GENERATE else model  # the last event of /generate is a whole response
    for event, kind in [*((event, model) for event in events), (last, whole)]:
        assert not undocumented(TypeAdapter(kind).validate_json(json.dumps(event), strict=True))


def undocumented(value: Any) -> set[str]:
    """Names of fields that the models of a response do not declare."""
    if isinstance(value, list):
        return set().union(*map(undocumented, value))
    if not isinstance(value, BaseModel):
        return set()
    return set(value.model_extra or ()).union(*(undocumented(item) for _, item in value))
