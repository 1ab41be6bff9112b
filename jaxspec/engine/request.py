"""A request in the engine, its updates and its output. Plain Python, no JAX."""

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from jaxspec.checks import is_int, is_number
from jaxspec.engine.adaptive import DraftFactors
from jaxspec.engine.pages import HeldPages
from jaxspec.engine.repeats import Repeats
from jaxspec.engine.speculation import CycleCounts, Speculation, Verification
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.detokenizer import Decoder, Detokenizer
from jaxspec.tree_shape import TreeLike, TreeShape, names_of

if TYPE_CHECKING:
    from jaxspec.grammar.matcher import Matcher  # loads transformers

type Ids = tuple[int, ...]

FAILED = "the engine failed while it worked on this request"
"""Error text shown to clients whose request failed because of the engine."""


class EngineError(RuntimeError):
    """The engine failed while it worked on a request; the request itself was not at fault."""


class RequestError(EngineError):
    """A request can't go on, by its own fault: its grammar leaves no token."""


class RefusedRequest(ValueError):
    """The engine refuses one of several requests that were to start together, the one at this place."""

    def __init__(self, error: ValueError, place: int):
        super().__init__(str(error))
        self.place = place


class EngineClosed(EngineError):
    """The engine takes no more requests and has dropped those it had."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to compute, on its way from the API to the engine. What a request may ask for is declared here and nowhere
    else: whatever lies between passes the whole."""

    prompt: tuple[int, ...]
    """Token ids. (Another sequence becomes a tuple.)"""
    params: SamplingParams
    """How to sample; n must be 1 (see SamplingParams.copies)."""
    priority: int = 0
    """Larger is more urgent; among equals the first to arrive is served first."""
    timeout: float | None = None
    """Seconds after which it ends with finish_reason "timeout", waiting or running. None: never."""
    tree: TreeLike | None = None
    """The tree of its cycles, one of those of the engine; None: the engine chooses."""
    cache_salt: str | None = None
    """It shares cached prefixes and generated texts only with requests of the same salt. None: with those that have none."""
    wants_trees: bool = False
    """Its updates show the drafted trees (Verification.tree), and where the text of each token begins."""
    ends: tuple[str, ...] = ()
    """Strings that end its text as params.stop does: the chat template's own."""

    def __post_init__(self):
        object.__setattr__(self, "prompt", tuple(self.prompt))

    def detokenizer(self, tokenizer: Decoder | None) -> Detokenizer:
        """For its text; with offsets if it asks for log probabilities or trees."""
        params = self.params
        return Detokenizer(
            tokenizer, (*params.stop, *self.ends), skip_special_tokens=params.skip_special_tokens, min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output, with_offsets=self.wants_trees or params.logprobs is not None,
            prompt=self.prompt,
        )  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Times in seconds since the request was added."""

    queue_seconds: float
    """Until its first chunk was launched, or else until its end."""
    first_token_seconds: float | None
    """Until its first token was read; None without a token."""
    total_seconds: float


class TokenLogprob(NamedTuple):
    """The log probability that the model gave a token, and the most likely tokens there (SamplingParams.logprobs)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token ids and log probabilities, best first."""


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
    """"stop" (a stop token or string), "length" (max_tokens), "abort", "timeout", or "error" (the engine failed; see `error`)."""
    matched_stop: int | str | None
    """The stop token id or stop string that ended it."""
    speculation: Speculation
    timing: Timing
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry per generated token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry per token of the prompt, if the request asks for them; None for the first token."""
    error: str | None = None
    """The error message, with finish_reason "error"."""
    is_own_fault: bool = False
    """The error is the request's own, not the engine's: its grammar can't be followed any further."""
    prompt_index: int = 0
    """Which prompt of the call this completes."""
    index: int = 0
    """Which completion of the prompt this is, 0 .. n - 1."""
    text_offsets: tuple[int, ...] | None = None
    """Where the text of each generated token begins in `text`, in characters. Only with logprobs or `wants_trees`. A token that
    was cut off at the end of the text may begin past that end."""


@dataclass(frozen=True)
class Update:
    """The text and tokens that one engine step added to a request."""

    request_id: str
    text: str
    """New text; never half a character, and never the start of a stop string."""
    token_ids: tuple[int, ...]
    """New tokens. Their text may come with a later update."""
    output: GenerationOutput | None = None
    """The whole result, with the last update of the request."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry per new token, if the request asks for them."""
    verification: Verification | None = None
    """None for the first token, which the prefill emits, and if there are no new tokens."""
    prompt_index: int = 0
    index: int = 0
    """As in GenerationOutput."""
    text_start: int = 0
    """Where `text` begins in the text of the whole output, in characters."""
    text_offsets: tuple[int, ...] | None = None
    """As in GenerationOutput, for the new tokens."""


class Status(Enum):
    """The state of a request in the scheduler."""

    WAITING = "waiting"
    """New, or preempted: it holds no row and no pages."""
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request. The scheduler changes status, row, held, prefilled and cached_tokens; the runner is_masked; the engine the
    fields after these."""

    id: str
    asked: GenerationRequest
    seed: int
    """Unsigned 64 bits."""
    stop_token_ids: tuple[int, ...]
    """Checked on the device: the request's own and, unless ignore_eos, the model's end-of-sequence tokens."""
    detokenizer: Detokenizer
    arrival: int = 0
    """Number in the order of arrival."""
    deadline: float = math.inf
    """When it times out, on the engine's clock, in seconds."""
    tree: TreeShape | None = None
    """The tree that it asked for."""
    matcher: "Matcher | None" = None
    """Its grammar after the tokens that were read; None: its text is free."""

    status: Status = Status.WAITING
    row: int = -1
    """Its row of the device state while it prefills or runs."""
    is_masked: bool = False
    """The row has a mask (Runner.launch_mask)."""
    held: HeldPages = field(default_factory=HeldPages)
    prefilled: int = 0
    """Tokens whose keys the launched prefill chunks have committed, cached ones included."""
    cached_tokens: int = 0
    """Tokens that were found in the prefix cache when the request was first admitted."""

    in_flight: int = 0
    """Launched programs that emit tokens and were not read yet."""
    in_flight_tokens: int = 0
    """Tokens that these programs emit, at most."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and the generated tokens, as far as results were read."""
    most_tokens: int = 0
    """Prompt and output together, at most: the slots that it can need."""
    cycles: list[CycleCounts] = field(default_factory=list)
    draft_factors: DraftFactors = field(default_factory=DraftFactors.new)
    repeats: Repeats = field(default_factory=Repeats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    is_own_fault: bool = False
    """As in GenerationOutput."""
    added_at: float = 0.0
    """On the engine's clock, as the next three."""
    launched_at: float | None = None
    """When its first chunk was launched."""
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self):
        self.tokens = list(self.asked.prompt)
        self.most_tokens = len(self.tokens) + self.asked.params.max_tokens
        if self.asked.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.tokens)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.asked.prompt

    @property
    def params(self) -> SamplingParams:
        return self.asked.params

    @property
    def generated(self) -> int:
        """The number of generated tokens whose results were read."""
        return len(self.tokens) - len(self.asked.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.asked.prompt) :]

    @property
    def speculation(self) -> Speculation:
        return Speculation(tuple(self.cycles))

    @property
    def timing(self) -> Timing:
        end = self.added_at if self.finished_at is None else self.finished_at
        launched = end if self.launched_at is None else self.launched_at
        first = None if self.first_token_at is None else self.first_token_at - self.added_at
        return Timing(launched - self.added_at, first, end - self.added_at)

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
            speculation=self.speculation,
            timing=self.timing,
            cached_tokens=self.cached_tokens,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            error=self.error,
            is_own_fault=self.is_own_fault,
            text_offsets=self.detokenizer.offsets_of(0, self.generated),
        )


@dataclass(frozen=True)
class Limits:
    """The limits of an engine."""

    vocab_size: int
    context_length: int
    """Prompt and output together, in tokens."""
    max_stop_tokens: int
    eos_token_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    has_tokenizer: bool
    trees: tuple[TreeShape, ...]
    """Those that a request may ask for."""

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The request's stop tokens and, unless ignore_eos, the model's end-of-sequence tokens. Raises ValueError if too many."""
        stop = tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))))
        if len(stop) > self.max_stop_tokens:
            raise ValueError(
                f"stop_token_ids and the model's end-of-sequence tokens are {len(stop)}; at most {self.max_stop_tokens} fit: give "
                "fewer stop_token_ids"
            )
        return stop

    def tree(self, asked: GenerationRequest) -> TreeShape | None:
        """The tree that the request asks for. Raises ValueError if the engine has no such tree."""
        tree = None if asked.tree is None else TreeShape.of(asked.tree)
        if tree is not None and tree not in self.trees:
            raise ValueError(f"tree {tree.name} is not among those of this engine: {names_of(self.trees)} (see request_trees)")
        return tree

    def check(self, asked: GenerationRequest) -> None:
        """Raises ValueError, naming the field, if the request can't be served."""
        prompt, params = asked.prompt, asked.params
        if not is_int(asked.priority):
            raise ValueError(f"priority must be a whole number, got {asked.priority!r:.80}")
        if asked.timeout is not None and not (is_number(asked.timeout) or asked.timeout == math.inf):
            raise ValueError(f"timeout must be a number of seconds, got {asked.timeout!r:.80}")
        if asked.timeout is not None and not asked.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {asked.timeout!r}")
        if not prompt:
            raise ValueError("prompt is empty: at least one token is needed")
        _check_ids(self.vocab_size, "prompt", prompt)
        allowed = tuple(params.allowed_token_ids or ())
        _check_lists(
            self.vocab_size, tuple(params.stop_token_ids), tuple(params.bad_token_ids), allowed, (*dict(params.logit_bias),)
        )
        if params.n != 1:
            raise ValueError(f"n is {params.n}, but the engine takes single completions: add each of SamplingParams.copies()")
        needed = len(prompt) + params.max_tokens
        if needed > self.context_length:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({params.max_tokens}) are {needed} tokens together, more than the "
                f"context length of {self.context_length}: shorten the prompt or lower max_tokens"
            )
        if params.stop and not self.has_tokenizer:
            raise ValueError("stop strings need a tokenizer, and this model directory has none: use stop_token_ids")


@lru_cache(maxsize=1)  # the copies of a request have the same lists, which may be long
def _check_lists(size: int, stop: Ids, bad: Ids, allowed: Ids, biased: Ids) -> None:
    for name, ids in {"stop_token_ids": stop, "bad_token_ids": bad, "allowed_token_ids": allowed, "logit_bias": biased}.items():
        _check_ids(size, name, ids)
    if len(set(bad)) == size or (allowed and not set(allowed) - set(bad)):
        raise ValueError("bad_token_ids bans every token that could be drawn: leave some")


def _check_ids(size: int, name: str, ids: Ids) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ValueError(f"{name} holds token id {min(ids) if min(ids) < 0 else max(ids)}; ids are 0 to {size - 1}")
