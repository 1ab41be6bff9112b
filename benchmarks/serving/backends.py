"""The three protocols: what each sends, and what its answers say."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NamedTuple

from .answers import Request


class UsageFields(Enum):
    """Which `stream_options` a server is asked for; the first that it accepts is taken."""

    PER_CHUNK = "include_usage and continuous_usage_stats"
    AT_END = "include_usage"
    NONE = "none"

    @property
    def body(self) -> dict[str, Any]:
        match self:
            case UsageFields.PER_CHUNK:
                return {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            case UsageFields.AT_END:
                return {"stream_options": {"include_usage": True}}
            case UsageFields.NONE:
                return {}


class Generation(NamedTuple):
    """What every request of a run asks for."""

    model: str
    temperature: float
    ignore_eos: bool
    stream: bool
    extra_body: dict[str, Any]


class Piece(NamedTuple):
    """What one event, or a whole answer, says."""

    text: str
    """New text; of a backend with cumulative text, all of it."""
    tokens: int | None = None
    """Of the completion, up to here."""
    prompt_tokens: int | None = None
    accept_length: float | None = None
    accept_length_source: str | None = None
    has_choice: bool = True
    """Is it about the completion? OpenAI's last chunk only sums up."""
    finish_reason: str | None = None


class Backend(ABC):
    """One protocol."""

    path: str
    is_cumulative = False
    """Does every event repeat the text before it?"""
    has_stream_options = True
    """Are tokens counted only for those who ask?"""

    @abstractmethod
    def body(self, request: Request, generation: Generation, usage: UsageFields) -> dict[str, Any]:
        """The request's JSON."""

    @abstractmethod
    def piece(self, event: dict[str, Any]) -> Piece:
        """What an event says. Whatever is raised by looking into one of another shape may be raised here."""


class Completions(Backend):
    """OpenAI's /v1/completions."""

    path = "/v1/completions"
    length_field = "max_tokens"

    def body(self, request: Request, generation: Generation, usage: UsageFields) -> dict[str, Any]:
        return {
            "model": generation.model,
            **self.prompt(request),
            self.length_field: request.output_len,
            "temperature": generation.temperature,
            "stream": generation.stream,
            **({"ignore_eos": True} if generation.ignore_eos else {}),  # not OpenAI's own, so only if it is wanted
            **(usage.body if generation.stream else {}),
            **generation.extra_body,
        }

    def prompt(self, request: Request) -> dict[str, Any]:
        return {"prompt": request.prompt}

    def text(self, choice: dict[str, Any]) -> str:
        return choice["text"] or ""

    def piece(self, event: dict[str, Any]) -> Piece:
        choices, usage = event["choices"], event.get("usage") or {}
        text = "".join(self.text(choice) for choice in choices)
        counts = count(usage, "completion_tokens"), count(usage, "prompt_tokens")
        reason = next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)
        return Piece(text, *counts, *accept_length(event), has_choice=bool(choices), finish_reason=reason)


class ChatCompletions(Completions):
    """OpenAI's /v1/chat/completions."""

    path = "/v1/chat/completions"
    length_field = "max_completion_tokens"

    def prompt(self, request: Request) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": request.prompt}]}

    def text(self, choice: dict[str, Any]) -> str:
        """What the model wrote: its answer, or what it thinks before."""
        said = choice["delta"] if "delta" in choice else choice["message"]
        return (said.get("reasoning_content") or said.get("reasoning") or "") + (said.get("content") or "")


class Generate(Backend):
    """SGLang's /generate."""

    path = "/generate"
    is_cumulative = True
    has_stream_options = False

    def body(self, request: Request, generation: Generation, usage: UsageFields) -> dict[str, Any]:
        prompt = {"text": request.prompt} if isinstance(request.prompt, str) else {"input_ids": request.prompt}
        params = {
            "max_new_tokens": request.output_len, "temperature": generation.temperature, "ignore_eos": generation.ignore_eos,
        }  # fmt: skip
        return {**prompt, "sampling_params": params, "stream": generation.stream, **generation.extra_body}

    def piece(self, event: dict[str, Any]) -> Piece:
        meta = event["meta_info"]
        length, reason = number(meta.get("spec_accept_length")), meta.get("finish_reason")
        source = None if length is None else "meta_info.spec_accept_length"
        counts = count(meta, "completion_tokens"), count(meta, "prompt_tokens")
        return Piece(event["text"] or "", *counts, length, source, finish_reason=reason["type"] if reason else None)


def count(fields: dict[str, Any], name: str) -> int | None:
    """A number of tokens; None if it is not given. Raises TypeError if it is no such number."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError(f"{name} is {str(value)[:40]!r}, not a number of tokens")
    return value


def number(value: object) -> float | None:
    """Raises TypeError if it is neither a number nor None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def accept_length(event: dict[str, Any]) -> tuple[float | None, str | None]:
    """Of one request, and where it stands: vLLM's field, else SGLang's.

    In: {"metrics": {"speculative_decoding": {"mean_acceptance_length": 2.5, ...}}, ...}
    Out: 2.5, "metrics.speculative_decoding.mean_acceptance_length"
    """
    places = {
        "metrics.speculative_decoding.mean_acceptance_length": ("metrics", "speculative_decoding", "mean_acceptance_length"),
        "sglext.spec_tokens_details.spec_accept_length": ("sglext", "spec_tokens_details", "spec_accept_length"),
    }
    for name, path in places.items():
        found: Any = event
        for key in path:
            found = (found or {}).get(key)
        if found is not None:
            return number(found), name
    return None, None


BACKENDS: dict[str, Backend] = {"openai": Completions(), "openai-chat": ChatCompletions(), "sglang": Generate()}
