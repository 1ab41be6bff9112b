"""The answers of /generate, /v1/completions, /v1/chat/completions and /v1/models, for /openapi.json."""

from typing import Any

from jaxspec.server.answers import Answer, answers, answers_or_streams, errors


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    """A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeMetrics(Answer):
    """vLLM's names."""

    mean_acceptance_length: float
    """Tokens per verification, bonus included."""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """How many verifications accepted 0, 1, 2, ... drafts."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class Metrics(Answer):
    speculative_decoding: SpeculativeMetrics


class OpenAIAnswer(Answer):
    id: str
    object: str
    created: int
    model: str
    usage: Usage
    metrics: Metrics | None = None
    """For one choice that was speculated on."""


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionAnswer(OpenAIAnswer):
    choices: list[CompletionChoice]


class ChatMessage(Answer):
    role: str
    content: str
    refusal: str | None


class ChatLogprobs(Answer):
    content: list[dict[str, Any]]


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(OpenAIAnswer):
    choices: list[ChatChoice]


class ModelCard(Answer):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer):
    object: str
    data: list[ModelCard]


class FinishReason(Answer):
    type: str
    """stop, length or abort."""
    matched: str | int | None = None
    length: int | None = None


class MetaInfo(Answer):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    spec_verify_ct: int
    spec_accept_length: float


class GenerateAnswer(Answer):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


_FAILURES = errors(404, 415, 504)
COMPLETION = answers_or_streams(CompletionAnswer, "each a text_completion whose text continues the one before") | _FAILURES
CHAT = answers_or_streams(ChatAnswer, "each a chat.completion.chunk") | _FAILURES
GENERATE = answers_or_streams(GenerateAnswer | list[GenerateAnswer], "each with the whole text so far") | _FAILURES
MODELS = answers(ModelList)
MODEL = answers(ModelCard) | errors(404)
