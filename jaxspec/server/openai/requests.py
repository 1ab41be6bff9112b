"""The requests of OpenAI's API, and their translation for the engine. Fields mean the same as in OpenAI's API or, for extras, in
SGLang and vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from jaxspec.sampling_params import CONSTRAINTS, SamplingParams
from jaxspec.server.conversations import Messages
from jaxspec.server.errors import ApiError, restated, wrong
from jaxspec.server.fields import Copies, LogprobCount, Only, Prompt, RequestModel, RequestName, TokenCount, TokenCountOrZero
from jaxspec.server.model import ServedModel, is_single
from jaxspec.server.neutral_fields import CHAT, COMPLETION, OPENAI, neutral
from jaxspec.server.running import MAX_LOGPROBS, RequestBatch
from jaxspec.server.sampling_fields import OPENAI_NAMES, OpenAISamplingFields, sampling_params
from jaxspec.server.speculation import SharedFields, requests_of
from jaxspec.server.structured import Given, StructuredFields, given_constraint
from jaxspec.server.tools import ConversationFields, ToolChoice, ToolUse, chosen_tools, constraint_for, conversation_text
from jaxspec.text.answer_parser import AnswerFormat, Thinking

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions; a chat reply may fill the context."""
THINKING = "enable_thinking"
"""The variable by which chat templates let a request turn thinking on and off."""
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
class OpenAIRequest(SharedFields, StructuredFields, OpenAISamplingFields):
    """The fields that completions and chat completions share."""

    model: str | None = None
    """None: the served model."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy. None: the model's own, else 1.0."""
    no_stop_trim: bool | None = None
    """SGLang's name of include_stop_str_in_output."""
    stream_options: StreamOptions | None = None
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
    """Log probabilities of every token and of this many of the most likely tokens."""
    best_of: Copies | None = None
    """Must equal n: choosing the best of more is not supported."""


@neutral(CHAT)
class ChatRequest(ConversationFields, OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    """None: max_tokens, or the rest of the context, or with logprobs as many as fit into a response."""
    max_tokens: TokenCount | None = None
    """The older name of max_completion_tokens, which takes precedence."""
    logprobs: bool | None = None
    """Log probabilities of every token of the reply."""
    top_logprobs: LogprobCount | None = None
    """With logprobs: also of this many of the most likely tokens."""

    tool_choice: ToolChoice | None = None
    """None: auto, if there are tools."""
    parallel_tool_calls: bool | None = None
    """False: the answer has one call at most."""
    separate_reasoning: bool | None = None
    """SGLang's: false leaves the thinking in the content. With a reasoning parser only."""
    include_reasoning: bool | None = None
    """vLLM's: false leaves it out of the response."""
    reasoning_effort: Annotated[Any, Only("none")] = None
    """none: the model does not think, if its chat template can turn it off and chat_template_kwargs does not say otherwise."""


def completion_batch(body: CompletionRequest, model: ServedModel) -> RequestBatch:
    """Token ids and sampling parameters of every prompt. Raises ApiError, naming the field at fault."""
    model.check_name(body.model)
    if model.tokenizer is None:
        said = "this model has no tokenizer, so there is no text to return; send token ids to /generate as input_ids"
        raise wrong("prompt:", said)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise wrong("best_of", f"is not supported yet (leave it out or send n, {body.n or 1})")
    if body.echo and body.logprobs is not None and body.stream:
        raise wrong("echo", "with logprobs can't be streamed: leave out stream, echo or logprobs")
    prompt_only = body.max_tokens == 0
    if prompt_only and (not body.echo or body.stream):
        raise wrong("max_tokens", "must be at least 1, or 0 with echo and without stream")
    if prompt_only and body.min_tokens:
        raise wrong("min_tokens", f"({body.min_tokens}) must not be more than max_tokens (0)")
    model.check_count(body.prompt, body.n, param="prompt", n_param="n")
    names = completion_names(body)
    prompts, own_names = [], []
    for param, ids in model.prompts(body.prompt, "prompt"):
        own_names.append({"prompt": param})
        asked, default = (None, 1) if prompt_only else (body.max_tokens, DEFAULT_MAX_TOKENS)
        budget = model.budget(len(ids), asked, default, param=param, budget_param="max_tokens")
        of_prompt = body.logprobs if body.echo else None
        logprobs: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": of_prompt}
        prompts.append((tuple(ids), _params(body, model, names, budget, given_constraint(body), **logprobs)))
    given = [body.prompt] if is_single(body.prompt) else body.prompt
    texts = [prompt if isinstance(prompt, str) else None for prompt in given]
    echo = texts if body.echo else None
    return _batch(body, model, prompts, client_names=names, own_names=own_names, echo=echo, prompt_only=prompt_only)


def chat_batch(body: ChatRequest, model: ServedModel) -> RequestBatch:
    """Token ids and sampling parameters of the conversation. Raises ApiError, naming the field at fault."""
    model.check_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")
    model.check_count("", body.n, param="messages", n_param="n")
    use, text, ids = chat_prompt(body, model)
    names, max_tokens = chat_names(body), body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    default = None if logprobs is None else MAX_LOGPROBS // ((logprobs + 1) * (body.n or 1))
    budget = model.budget(len(ids), max_tokens, default, param="messages", budget_param=names["max_tokens"])
    answer = answer_format(body, model, use, text)
    if body.logprobs and body.include_reasoning is False and answer.thinking is not Thinking.NONE:
        raise wrong("include_reasoning", "must not be false with logprobs, which show the thinking too: leave one of them out")
    constraint = constraint_for(use, given_constraint(body), answer.reasoning, answer.thinking)
    more: dict[str, Any] = {"logprobs": logprobs}
    if model.has_special(*(use.format.tags if use else ()), *(answer.reasoning[:2] if answer.reasoning else ())):
        more["skip_special_tokens"] = False  # the parser needs them
    params = _params(body, model, names, budget, constraint, **more)
    batch = _batch(body, model, [(tuple(ids), params)], client_names=names, answer=answer)
    ends = () if body.ignore_eos or model.chat_template is None else model.chat_template.stop
    return replace(batch, prompts=[replace(each, ends=ends) for each in batch.prompts])


def translated_batch(chat: ChatRequest, model: ServedModel, client_names: Mapping[str, str]) -> RequestBatch:
    """The batch of a chat that a request of another API was translated to. Raises ApiError in the words of that API, which has
    other names for some fields."""
    if chat.speculative is not None and chat.speculative.trace:
        raise wrong("speculative.trace", "is not supported in this endpoint: use /v1/chat/completions")
    try:
        batch = chat_batch(chat, model)
    except ApiError as error:
        raise restated(error, client_names) from None
    names = {ours: client_names.get(theirs, theirs) for ours, theirs in batch.client_names.items()}
    return replace(batch, client_names={**client_names, **names})


def chat_prompt(body: ChatRequest, model: ServedModel) -> tuple[ToolUse | None, str, list[int]]:
    """The tools that the answer may call, and the conversation as text and as token ids. Raises ApiError, naming the field at
    fault."""
    use = chosen_tools(body.tools, body.tool_choice, body.parallel_tool_calls, model)
    thinks = None if body.reasoning_effort is None else False
    options = thinking_options(thinks, model, "reasoning_effort") | (body.chat_template_kwargs or {})
    text = conversation_text(body.messages, body.model_copy(update={"chat_template_kwargs": options or None}), model, use)
    return use, text, model.chat_token_ids(text)


def thinking_options(thinks: bool | None, model: ServedModel, param: str) -> dict[str, Any]:
    """The template's variables for an answer with or without thinking; None: as the model does. Raises ApiError, naming `param`,
    if the model can't."""
    if thinks is None:
        return {}
    if thinks and model.reasoning is None:
        raise wrong(f"{param}:", "the thinking is not known: leave it out, or start the server with --reasoning-parser")
    if model.chat_template is not None and THINKING in model.chat_template.options:
        return {THINKING: thinks}
    if not thinks and model.reasoning is not None:
        raise wrong(f"{param}:", "the model's chat template can't turn thinking off: leave it out")
    return {}


def answer_format(body: ChatRequest, model: ServedModel, use: ToolUse | None, prompt: str) -> AnswerFormat:
    """What the answer to a rendered conversation may hold. Raises ApiError, naming the field at fault."""
    reasoning, is_left_out = model.reasoning, body.include_reasoning is False
    if reasoning is None and is_left_out:
        raise wrong("include_reasoning:", "the thinking is not known: start the server with --reasoning-parser")
    thinking = Thinking.NONE
    if reasoning is not None:
        begun = body.messages[-1].text if body.continue_final_message else ""
        thinking = reasoning.within(begun) if begun.strip() else reasoning.after(prompt)
    return AnswerFormat(
        reasoning=reasoning,
        thinking=thinking,
        is_separate=body.separate_reasoning is not False or is_left_out,
        tool_parser=None if use is None else use.format.read,
        tools={} if use is None else use.schemas,
        only_one_call=use is not None and use.only_one,
    )


def completion_names(body: CompletionRequest) -> dict[str, str]:
    """Our names of fields, and those of this client where they differ."""
    given = given_constraint(body)
    return _COMPLETION_NAMES | ({} if given is None else {given.name: given.field})


def chat_names(body: ChatRequest) -> dict[str, str]:
    """The same for a chat."""
    budget = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    given, must_call = given_constraint(body), body.tool_choice not in (None, "none", "auto")
    whole = "tools" if given is None or must_call else given.field  # what a structural tag of the whole answer is made of
    return _CHAT_NAMES | {"max_tokens": budget, "structural_tag": whole} | ({} if given is None else {given.name: given.field})


def _batch(
    body: OpenAIRequest, model: ServedModel, prompts: Sequence[tuple[tuple[int, ...], SamplingParams]], **more: Any
) -> RequestBatch:
    """The prompts with the fields that both kinds of requests have."""
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "needs stream to be true")
    return RequestBatch(requests_of(body, model, prompts, body.n), rid=body.request_id, **more)


def _params(
    body: OpenAIRequest, model: ServedModel, client_names: Mapping[str, str], max_tokens: int, constraint: Given | None,
    **more: Any,
) -> SamplingParams:  # fmt: skip
    fields: dict[str, Any] = {ours: getattr(body, theirs) for ours, theirs in OPENAI_NAMES.items()}
    given = {name: model.sampling_defaults.get(name) if value is None else value for name, value in fields.items()}
    if constraint is not None:
        given |= dict.fromkeys(CONSTRAINTS) | {constraint.name: constraint.value}
    given["include_stop_str_in_output"] = body.include_stop_str_in_output or body.no_stop_trim
    return sampling_params(client_names, max_tokens=max_tokens, **{**given, **more})
