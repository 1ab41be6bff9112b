"""What the endpoints answer, for /openapi.json. Documentation only: answers are made as plain dictionaries and not checked
against these at run time, but tests do so."""

from typing import Any

from pydantic import BaseModel, ConfigDict

type Documented = dict[int | str, dict[str, Any]]
"""Statuses and what FastAPI shall say of each."""


class Answer(BaseModel):
    """Fields may be added; those that are there stay."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), use_attribute_docstrings=True)


class Problem(Answer):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    """invalid_request_error, or server_error from status 500 on."""
    param: str | None
    """The field at fault."""
    code: str | int
    """OpenAI's word where it has one, else the status."""


class ErrorAnswer(Answer):
    """Every failure."""

    error: Problem


class HealthAnswer(Answer):
    status: str


class VersionAnswer(Answer):
    version: str


class ModelInfo(Answer):
    model_path: str
    """The served name, never a path."""
    served_model_name: str
    tokenizer_path: str | None
    is_generation: bool
    context_length: int


class EngineState(Answer):
    last_gen_throughput: float
    """Tokens per second of work, since the cache was flushed."""
    num_running_reqs: int
    num_waiting_reqs: int
    avg_spec_accept_length: float | None = None
    """Tokens per verification since the cache was flushed, bonus included; absent before the first one."""


class ServerInfo(Answer):
    """Beside these, the settings that the server was launched with, for whoever has the admin key."""

    served_model_name: str
    version: str
    tree: str
    """The draft tree: levels/children/nodes. 0/1/1 is plain decoding."""
    speculative_trees: list[str]
    """All that requests may ask for."""
    context_length: int
    max_total_num_tokens: int
    """Size of the cache, in tokens."""
    internal_states: list[EngineState]


class Load(Answer):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    """Share of the cache that requests hold."""
    gen_throughput: float
    cache_hit_rate: float
    utilization: float


class AggregateLoad(Answer):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class LoadsAnswer(Answer):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: AggregateLoad


class AbortAnswer(Answer):
    aborted: int
    """Completions that were ended."""


class TokenizeAnswer(Answer):
    """A list of prompts gets lists."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None


class DetokenizeAnswer(Answer):
    """A list of lists gets lists."""

    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfo(Answer):
    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


_MEANINGS = {
    400: "A field, parameter or header is wrong; the message says which.",
    401: "The key is missing or wrong.",
    404: "There is no such endpoint or model.",
    405: "The endpoint does not take this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    500: "The server failed; its log says why.",
    503: "The queue is full, the engine does not work, or the server is shutting down. Retry-After says when to come back.",
    504: "The request was not finished in time.",
}


def errors(*statuses: int) -> Documented:
    """Failures, all in one shape."""
    return {status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in statuses}


def answers(model: Any) -> Documented:
    """An answer in JSON."""
    return {200: {"model": model, "description": "The answer."}}


def answers_or_streams(model: Any, chunk: str) -> Documented:
    """An answer in JSON, or with `stream` server-sent events; `chunk` says what they hold. The schema is that of one event."""
    data = {"type": "string", "description": f"JSON, {chunk}; of the last event: [DONE]."}
    events = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    return {200: {"model": model, "description": "The answer, whole or as a stream.", "content": {"text/event-stream": events}}}


EVERYWHERE = errors(400, 401, 405, 408, 413, 500, 503)
"""What any endpoint may answer."""
