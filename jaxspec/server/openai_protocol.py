"""The requests of OpenAI's API, field by field; each field's meaning is OpenAI's, or that of SGLang and vLLM for their extras."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxspec.server.fields import (
    AllowedTokenIds,
    Copies,
    Logprobs,
    Priority,
    Prompt,
    RequestName,
    Strict,
    TemplateOptions,
    Tokens,
    TokensOrNone,
    described_as,
    only,
)
from jaxspec.server.sampling_fields import SamplingFields
from jaxspec.server.speculation import SpeculativeField


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """Token counts in a last chunk without choices."""
    continuous_usage_stats: bool | None = None
    """vLLM's: token counts so far in every chunk."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis. It may be asked for; the API does not promise it."""


class OpenAIRequest(SamplingFields):
    """What completions and chat completions share."""

    model: str | None = None
    """None: the served model."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """None: 1.0."""
    allowed_token_ids: AllowedTokenIds | None = None
    """vLLM's: only these can be drawn."""
    seed: int | None = None
    """Completion i of a prompt has the seed + i."""
    min_tokens: TokensOrNone | None = None
    include_stop_str_in_output: bool | None = None
    """vLLM's name of no_stop_trim."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    """Larger is more urgent, as in SGLang. (In vLLM smaller is.)"""
    speculative: SpeculativeField | None = None
    """Our own: how this request is speculated on."""
    return_spec_tokens_details: bool | None = None
    """SGLang's: answers carry sglext.spec_tokens_details."""
    return_token_ids: bool | None = None
    """vLLM's: choices carry the ids of their tokens, and of their prompt."""
    request_id: RequestName | None = None
    """vLLM's: the request's name for /abort_request. None: its x-request-id."""

    # Harmless: they name the client or its bookkeeping.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not supported yet.
    response_format: Annotated[Any, only({"type": "text"})] = None
    structured_outputs: Annotated[Any, only()] = None
    bad_words: Annotated[Any, only([])] = None


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: TokensOrNone | None = None
    """None: 16, or what is left of the context. 0, with echo: the prompt alone, and its logprobs."""
    echo: bool | None = None
    """The answer begins with the prompt, and so do its logprobs."""
    logprobs: Logprobs | None = None
    """The log probability of every token and of so many likeliest ones."""
    best_of: Copies | None = None
    """May only repeat n: choosing the best of more is not supported."""

    prompt_logprobs: Annotated[Any, only()] = None
    suffix: Annotated[Any, only("")] = None


class TextPart(Strict):
    """A piece of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


type TextParts = Annotated[list[TextPart], FailFast()]


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | TextParts, described_as('a string or a list of {"type": "text", "text": ...} parts')]
    name: str | None = None

    # What openai-python sends back when a reply is put into the next request.
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None
    tool_call_id: Annotated[Any, only()] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: one string, parts joined by line breaks."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Tokens | None = None
    """None: max_tokens, or what is left of the context."""
    max_tokens: Tokens | None = None
    """The older name of max_completion_tokens, which wins."""
    logprobs: bool | None = None
    """The log probability of every token of the reply."""
    top_logprobs: Logprobs | None = None
    """With logprobs: and of so many likeliest ones."""

    parallel_tool_calls: bool | None = None
    """Harmless: without tools there are no calls."""
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    verbosity: Annotated[Any, only()] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
    web_search_options: Annotated[Any, only()] = None
    chat_template: Annotated[Any, only()] = None
    """Never from a request: a template is a program."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the model's own template reads, such as Qwen3's {"enable_thinking": false}."""
