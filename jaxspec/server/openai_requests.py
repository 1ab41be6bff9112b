"""The requests of OpenAI's API, and their translation for the engine. Fields mean the same as in OpenAI's API or, for extras, in
SGLang and vLLM."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationInfo

from jaxspec.engine.request import GenerationRequest
from jaxspec.sampling_params import CONSTRAINTS, SamplingParams
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import (
    Copies,
    LogprobCount,
    Only,
    Priority,
    Prompt,
    RequestModel,
    RequestName,
    TemplateOptions,
    TokenCount,
    TokenCountOrZero,
    described_as,
)
from jaxspec.server.model import ServedModel, is_single
from jaxspec.server.neutral_fields import CHAT, COMPLETION, OPENAI, each, neutral
from jaxspec.server.running import RequestBatch
from jaxspec.server.sampling_fields import OPENAI_NAMES, OpenAISamplingFields, sampling_params
from jaxspec.server.speculation import SpeculativeOptions, chosen_tree, wants_trace
from jaxspec.server.structured import StructuredFields, given_constraint

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions; a chat reply may fill the context."""
_COMPLETION_NAMES = {"prompt_logprobs": "logprobs", "rid": "request_id"}
_CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "rid": "request_id"}
"""Our names of fields, and the clients' where they differ."""


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None
    """Token counts in a last event without choices."""
    continuous_usage_stats: bool | None = None
    """vLLM's: token counts so far in every event."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis. Accepted without effect: the API does not promise it."""


@neutral(OPENAI)
class OpenAIRequest(StructuredFields, OpenAISamplingFields):
    """The fields that completions and chat completions share."""

    model: str | None = None
    """None: the served model."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy. None: the model's own, else 1.0."""
    no_stop_trim: bool | None = None
    """SGLang's name of include_stop_str_in_output."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    """Larger is more urgent, as in SGLang. (In vLLM smaller is.)"""
    speculative: SpeculativeOptions | None = None
    """Our own: speculation for this request."""
    return_spec_tokens_details: bool | None = None
    """SGLang's: the response has sglext.spec_tokens_details."""
    return_token_ids: bool | None = None
    """vLLM's: choices have the ids of their tokens and of their prompt."""
    request_id: RequestName | None = None
    """vLLM's: the request's name for /abort_request. None: its x-request-id."""

    # Accepted without effect: they identify the client.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


@neutral(COMPLETION)
class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: TokenCountOrZero | None = None
    """None: 16, or less if the context ends before. 0, with echo: only the prompt and its logprobs."""
    echo: bool | None = None
    """The text begins with the prompt, and so do the logprobs."""
    logprobs: LogprobCount | None = None
    """Log probabilities of every token and of this many likeliest tokens."""
    best_of: Copies | None = None
    """Must equal n: choosing the best of more is not supported."""


class TextPart(RequestModel):
    """A part of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


type TextParts = Annotated[list[TextPart], FailFast()]


# openai-python sends these fields when a reply becomes part of the next request.
@neutral(each("refusal audio function_call tool_call_id") | each("annotations tool_calls", []))
class Message(RequestModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | TextParts, described_as('a string or a list of {"type": "text", "text": ...} parts')]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: one string, parts joined by line breaks."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


def _unused_tools(value: Any, info: ValidationInfo) -> Any:
    return None if info.data.get("tool_choice") == "none" else value


type Tools = Annotated[Any, Only([]), BeforeValidator(_unused_tools)]


@neutral(CHAT)
class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: TokenCount | None = None
    """None: max_tokens, or the rest of the context."""
    max_tokens: TokenCount | None = None
    """The older name of max_completion_tokens, which takes precedence."""
    logprobs: bool | None = None
    """Log probabilities of every token of the reply."""
    top_logprobs: LogprobCount | None = None
    """With logprobs: also of this many likeliest tokens."""

    parallel_tool_calls: bool | None = None
    """Accepted without effect: there are no tools."""
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    tools: Tools = None
    """Not supported yet, but with tool_choice "none" a model would not use them anyway."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the model's own template reads, such as Qwen3's {"enable_thinking": false}."""


def completion_batch(body: CompletionRequest, model: ServedModel) -> RequestBatch:
    """Token ids and sampling parameters of every prompt. Raises ApiError, naming the field at fault."""
    model.check_name(body.model)
    if model.tokenizer is None:
        message = "prompt: this model has no tokenizer, so there is no text to return; send token ids to /generate as input_ids"
        raise ApiError(400, message, param="prompt")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is not supported yet (leave it out or send n, {body.n or 1})", param="best_of")
    if body.echo and body.logprobs is not None and body.stream:
        raise ApiError(400, "echo with logprobs can't be streamed: leave out stream, echo or logprobs", param="echo")
    prompt_only = body.max_tokens == 0
    if prompt_only and (not body.echo or body.stream):
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo and without stream", param="max_tokens")
    model.check_count(body.prompt, body.n, param="prompt", n_param="n")
    names = completion_names(body)
    prompts = []
    for param, ids in model.prompts(body.prompt, "prompt"):
        asked, default = (None, 1) if prompt_only else (body.max_tokens, DEFAULT_MAX_TOKENS)
        budget = model.budget(len(ids), asked, default, param=param, budget_param="max_tokens")
        of_prompt = body.logprobs if body.echo else None
        prompts.append((tuple(ids), _params(body, model, names, budget, logprobs=body.logprobs, prompt_logprobs=of_prompt)))
    given = [body.prompt] if is_single(body.prompt) else body.prompt
    texts = [prompt if isinstance(prompt, str) else None for prompt in given]
    return _batch(body, model, prompts, echo=texts if body.echo else None, prompt_only=prompt_only)


def chat_batch(body: ChatRequest, model: ServedModel) -> RequestBatch:
    """Token ids and sampling parameters of the conversation. Raises ApiError, naming the field at fault."""
    model.check_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    model.check_count("", body.n, param="messages", n_param="n")
    names = chat_names(body)
    messages = [message.for_template() for message in body.messages]
    ids = model.chat_token_ids(messages, "messages", body.chat_template_kwargs)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    budget = model.budget(len(ids), max_tokens, None, param="messages", budget_param=names["max_tokens"])
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ends = model.chat_template.stop if model.chat_template else ()
    return _batch(body, model, [(tuple(ids), _params(body, model, names, budget, ends, logprobs=logprobs))])


def completion_names(body: CompletionRequest) -> dict[str, str]:
    """Our names of fields, and those of this client where they differ."""
    return _COMPLETION_NAMES | _constraint_names(body)


def chat_names(body: ChatRequest) -> dict[str, str]:
    """The same for a chat."""
    budget = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return _CHAT_NAMES | {"max_tokens": budget} | _constraint_names(body)


def _constraint_names(body: OpenAIRequest) -> dict[str, str]:
    given = given_constraint(body)
    return {} if given is None else {given.name: given.field}


def _batch(
    body: OpenAIRequest, model: ServedModel, prompts: Sequence[tuple[tuple[int, ...], SamplingParams]], **more: Any
) -> RequestBatch:
    """The prompts with the fields that both kinds of requests have."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    trace = wants_trace(body.speculative, stream=body.stream, completions=len(prompts) * (body.n or 1))
    tree = chosen_tree(body.speculative, model)
    requests = [GenerationRequest(ids, params, body.priority or 0, tree=tree, wants_trees=trace) for ids, params in prompts]
    return RequestBatch(requests, rid=body.request_id, **more)


def _params(
    body: OpenAIRequest, model: ServedModel, client_names: Mapping[str, str], max_tokens: int, ends: Sequence[str] = (),
    **logprobs: int | None,
) -> SamplingParams:  # fmt: skip
    """`ends`: strings at which the answer stops besides the client's own."""
    fields: dict[str, Any] = {ours: getattr(body, theirs) for ours, theirs in OPENAI_NAMES.items()}
    given = {name: model.sampling_defaults.get(name) if value is None else value for name, value in fields.items()}
    if (constraint := given_constraint(body)) is not None:
        given |= dict.fromkeys(CONSTRAINTS) | {constraint.name: constraint.value}
    if ends:
        own = given["stop"] or ()
        given["stop"] = (*((own,) if isinstance(own, str) else own), *ends)
    given["include_stop_str_in_output"] = body.include_stop_str_in_output or body.no_stop_trim
    return sampling_params(client_names, max_tokens=max_tokens, **given, **logprobs)
