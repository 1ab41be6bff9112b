"""A request on its way through the engine, and what comes out. Plain Python: importing this loads no JAX."""

from dataclasses import dataclass, field
from enum import Enum

from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.sampling_params import SamplingParams


@dataclass(frozen=True)
class Speculation:
    """How the tokens of one request came about."""

    accept_lengths: tuple[int, ...]
    """Tokens that each verification emitted, bonus included; the prompt's prefill, which emits the first token, is not one."""
    accepted_drafts: int
    """Emitted tokens that the draft head had proposed."""

    @property
    def verify_count(self) -> int:
        """Verifications: forwards of the target after the prefill."""
        return len(self.accept_lengths)

    @property
    def accept_length(self) -> float:
        """Tokens per verification, bonus included; 1.0 is plain decoding's. 0.0 when nothing was verified."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0


@dataclass(frozen=True)
class GenerationOutput:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    """Without the stop string or special tokens; empty when the model has no tokenizer."""
    token_ids: tuple[int, ...]
    """Everything generated, a final stop token included."""
    finish_reason: str
    """"stop" (a stop token or string), "length" (max_tokens) or "abort"."""
    matched_stop: int | str | None
    """The stop token id or stop string that ended it."""
    speculation: Speculation


@dataclass(frozen=True)
class Update:
    """What one engine step added to a request."""

    request_id: str
    text: str
    """New text; never half a character, and never the start of a stop string."""
    token_ids: tuple[int, ...]
    """New tokens. Their text may come with a later update."""
    output: GenerationOutput | None = None
    """The whole result, with the last update of the request."""


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request. The scheduler changes row, pages, prefilled and status; the engine what comes after them."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Unsigned 64 bits."""
    stop_token_ids: tuple[int, ...]
    """What the device checks: the request's own and, unless ignore_eos, the model's end-of-sequence tokens."""
    detokenizer: Detokenizer

    status: Status = Status.WAITING
    row: int = -1
    """Its row of the device state while it prefills or runs."""
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    """Prompt tokens whose prefill was launched."""
    in_flight: int = 0
    """Launched steps that emit tokens and whose results were not read yet."""
    output: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    accepted_drafts: int = 0
    finish_reason: str | None = None
    matched_stop: int | str | None = None

    @property
    def wants_cycle(self) -> bool:
        """Every launched step emits at least one token; beyond the budget no further cycle can add any."""
        return self.status is Status.RUNNING and len(self.output) + self.in_flight < self.params.max_tokens

    def result(self) -> GenerationOutput:
        """The finished request as users see it."""
        assert self.finish_reason is not None
        return GenerationOutput(
            request_id=self.id,
            prompt_token_ids=self.prompt,
            text=self.detokenizer.text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            speculation=Speculation(tuple(self.accept_lengths), self.accepted_drafts),
        )
