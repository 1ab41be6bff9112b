"""The requests of OpenAI's API, field by field; each field's meaning is OpenAI's, or that of SGLang and vLLM for their extras."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxspec.server.fields import Prompt, Strict, StringOrStrings, TokenIds, described_as, only


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """Token counts in a last chunk without choices."""
    continuous_usage_stats: Annotated[Any, only(False)] = None
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis. It may be asked for; the API does not promise it."""


class SamplingFields(Strict):
    """What completions and chat completions share."""

    model: str | None = None
    """None: the served model."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """None: 1.0."""
    seed: int | None = None
    stop: StringOrStrings = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Harmless: they name the client or its bookkeeping.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not supported yet.
    n: Annotated[Any, only(1)] = None
    top_p: Annotated[Any, only(1)] = None
    top_k: Annotated[Any, only(-1, 0)] = None
    min_p: Annotated[Any, only(0)] = None
    min_tokens: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    logit_bias: Annotated[Any, only({})] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    priority: Annotated[Any, only(0)] = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: 16, or what is left of the context."""

    best_of: Annotated[Any, only(1)] = None
    echo: Annotated[Any, only(False)] = None
    logprobs: Annotated[Any, only()] = None
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


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: max_tokens, or what is left of the context."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older name of max_completion_tokens, which wins."""

    parallel_tool_calls: bool | None = None
    """Harmless: without tools there are no calls."""
    logprobs: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
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
    chat_template_kwargs: Annotated[Any, only({})] = None
