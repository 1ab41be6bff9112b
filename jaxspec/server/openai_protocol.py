"""The requests of OpenAI's API, field by field; each field's meaning is OpenAI's, or that of SGLang and vLLM for their extras."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxspec.server.fields import (
    AllowedTokenIds,
    Copies,
    LogitBias,
    Logprobs,
    MinP,
    Penalty,
    Priority,
    Prompt,
    RepetitionPenalty,
    Strict,
    StringOrStrings,
    TokenIds,
    Tokens,
    TokensOrNone,
    TopK,
    TopP,
    described_as,
    only,
)


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
    n: Copies | None = None
    """Completions of each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """None: 1.0."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    """-1 or 0: all tokens."""
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: AllowedTokenIds | None = None
    """vLLM's: only these can be drawn."""
    seed: int | None = None
    """Completion i of a prompt has the seed + i."""
    min_tokens: TokensOrNone | None = None
    stop: StringOrStrings = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    """Larger is more urgent, as in SGLang. (In vLLM smaller is.)"""

    # Harmless: they name the client or its bookkeeping.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not supported yet.
    response_format: Annotated[Any, only({"type": "text"})] = None
    structured_outputs: Annotated[Any, only()] = None
    bad_words: Annotated[Any, only([])] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    no_stop_trim: Annotated[Any, only(False)] = None
    stop_regex: Annotated[Any, only([])] = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Tokens | None = None
    """None: 16, or what is left of the context."""
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


class ChatRequest(SamplingFields):
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
    chat_template_kwargs: Annotated[Any, only({})] = None
