"""A request on its way through the engine, and what comes out. Plain Python: importing this loads no JAX."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from jaxspec.config import SpecConfig
from jaxspec.engine.detokenizer import Decoder, Detokenizer
from jaxspec.engine.pages import HeldPages
from jaxspec.sampling_params import SamplingParams

FAILED = "the engine failed while it worked on this request"
"""What whoever asked learns of a failure that is not theirs."""


class CycleCounts(NamedTuple):
    """What one cycle did for one request."""

    emitted: int
    """Tokens, bonus included."""
    accepted: int
    """Those of them that the draft head had proposed."""
    drafted: int
    """What it had proposed: the nodes below the root. 0: plain decoding."""
    num_steps: int
    """The depth of the tree: `accepted` is at most this."""


@dataclass(frozen=True)
class Speculation:
    """How the tokens of one request came about. The prompt's prefill, which emits the first one, is no cycle."""

    cycles: tuple[CycleCounts, ...] = ()

    @property
    def accept_lengths(self) -> tuple[int, ...]:
        """Tokens that each cycle emitted, bonus included."""
        return tuple(cycle.emitted for cycle in self.cycles)

    @property
    def verify_count(self) -> int:
        """Cycles: forwards of the target after the prefill."""
        return len(self.cycles)

    @property
    def accept_length(self) -> float:
        """Tokens per cycle, bonus included; 1.0 is plain decoding's. 0.0 when there was no cycle."""
        return sum(self.accept_lengths) / len(self.cycles) if self.cycles else 0.0

    @property
    def accepted_drafts(self) -> int:
        return sum(cycle.accepted for cycle in self.cycles)

    @property
    def proposed_drafts(self) -> int:
        return sum(cycle.drafted for cycle in self.cycles)

    @property
    def accept_rate(self) -> float:
        """Accepted drafts by proposed ones; 0.0 when there were none."""
        return self.accepted_drafts / self.proposed_drafts if self.proposed_drafts else 0.0

    @property
    def with_tree(self) -> tuple[CycleCounts, ...]:
        """The cycles that were not plain decoding."""
        return tuple(cycle for cycle in self.cycles if cycle.drafted)

    @property
    def tree_accept_length(self) -> float | None:
        """Tokens per cycle that was not plain decoding, bonus included; None when all were."""
        cycles = self.with_tree
        return sum(cycle.emitted for cycle in cycles) / len(cycles) if cycles else None


@dataclass(frozen=True)
class DraftedTree:
    """The tree of one cycle, as the target judged it. Node 0 is the root, the newest token before the cycle."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Node number of each node's parent, -1 for the root; parents come before children."""
    accepted: tuple[int, ...]
    """The accepted path, root first."""


@dataclass(frozen=True)
class Verification:
    """The cycle that the tokens of an update come from."""

    spec: SpecConfig
    accepted: int
    """So many of the tokens, the first ones, are accepted drafts."""
    tree: DraftedTree | None = None
    """If the request wants to see it and the cycle was not plain decoding."""


@dataclass(frozen=True)
class Timing:
    """What a request waited for, in seconds since it was added."""

    queue_seconds: float
    """Until its first chunk was launched, or until its end if none was."""
    first_token_seconds: float | None
    """Until its first token was read; None if there was none."""
    total_seconds: float


class TokenLogprob(NamedTuple):
    """The log probability that the model itself gave a token, and its likeliest tokens there (SamplingParams.logprobs)."""

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
    """One entry per generated token, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry per token of the prompt, if they were asked for; the first token has none."""
    error: str | None = None
    """What went wrong, with finish_reason "error"."""
    prompt_index: int = 0
    """Which prompt of the call this completes."""
    index: int = 0
    """Which completion of the prompt this is, 0 .. n - 1."""


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
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry per new token, if they were asked for."""
    verification: Verification | None = None
    """None for the first token, which the prefill emits, and if there are no new tokens."""
    prompt_index: int = 0
    index: int = 0
    """As in GenerationOutput."""


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """New, or preempted: it holds no row and no pages."""
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request. The scheduler changes status, row, held and prefilled; the engine what comes after them."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Unsigned 64 bits."""
    stop_token_ids: tuple[int, ...]
    """What the device checks: the request's own and, unless ignore_eos, the model's end-of-sequence tokens."""
    detokenizer: Detokenizer
    priority: int = 0
    """Larger is more urgent; among equals the earlier one is first."""
    arrival: int = 0
    """Its number in the order of arrival."""
    deadline: float = math.inf
    """When it ends at the latest, on the engine's clock, in seconds."""
    tree: SpecConfig | None = None
    """The tree of its cycles; None: whatever the engine chooses."""
    wants_trees: bool = False
    """Its updates show what was drafted."""

    status: Status = Status.WAITING
    row: int = -1
    """Its row of the device state while it prefills or runs."""
    held: HeldPages = field(default_factory=HeldPages)
    prefilled: int = 0
    """Tokens whose keys the launched prefill chunks have committed, cached ones included."""
    cached_tokens: int = 0
    """Tokens that were found in the prefix cache when the request was first admitted."""

    in_flight: int = 0
    """Launched steps that emit tokens and whose results were not read yet."""
    in_flight_tokens: int = 0
    """What these steps emit at most."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was generated so far, as far as results were read."""
    postponed: int = 0
    """Newest slots that the head's cache lacks, because plain cycles were launched between those with a tree."""
    cycles: list[CycleCounts] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    added_at: float = 0.0
    """On the engine's clock, as the next three."""
    launched_at: float | None = None
    """When its first chunk was."""
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self):
        self.tokens = list(self.prompt)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far, as far as results were read."""
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def most_tokens(self) -> int:
        """Prompt and output together, at most: the slots it can ever need."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def wants_cycle(self) -> bool:
        """Every launched step emits at least one token; beyond the budget no further cycle can add any."""
        return self.status is Status.RUNNING and self.generated + self.in_flight < self.params.max_tokens

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
        wanted, prompt_wanted = self.params.logprobs is not None, self.params.prompt_logprobs is not None
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
            logprobs=tuple(self.logprobs) if wanted else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if prompt_wanted else None,
            error=self.error,
        )


@dataclass(frozen=True)
class Limits:
    """What the engine can serve."""

    vocab_size: int
    context_length: int
    """Prompt and output together, in tokens."""
    max_stop_tokens: int
    num_pages: int
    page_size: int


class Intake:
    """Checks what comes in and makes requests of it."""

    def __init__(self, limits: Limits, eos_token_ids: tuple[int, ...], tokenizer: Decoder | None, random_seed: int):
        self._limits, self._eos_token_ids, self._tokenizer = limits, eos_token_ids, tokenizer
        self._seeds = random.Random(random_seed)
        self._arrivals = 0

    def request(self, prompt: Sequence[int], params: SamplingParams, request_id: str, priority: int, deadline: float) -> Request:
        """A new request. Raises ValueError, naming the field, for one that can't be served."""
        prompt = tuple(prompt)
        self._check(prompt, params)
        stop = tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids))))
        if len(stop) > self._limits.max_stop_tokens:
            raise ValueError(
                f"stop_token_ids and the model's end-of-sequence tokens are {len(stop)}; at most {self._limits.max_stop_tokens} fit"
            )
        drawn = self._seeds.getrandbits(64)  # drawn for every request, so that one with a seed does not shift the others
        number, self._arrivals = self._arrivals, self._arrivals + 1
        return Request(
            id=request_id,
            prompt=prompt,
            params=params,
            seed=drawn if params.seed is None else params.seed % 2**64,
            stop_token_ids=stop,
            detokenizer=Detokenizer.of_request(self._tokenizer, params),
            priority=priority,
            arrival=number,
            deadline=deadline,
        )

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        limits = self._limits
        if not prompt:
            raise ValueError("prompt is empty: at least one token is needed")
        allowed = params.allowed_token_ids
        for name, ids in {
            "prompt": prompt,
            "stop_token_ids": params.stop_token_ids,
            "bad_token_ids": params.bad_token_ids,
            "allowed_token_ids": allowed or (),
            "logit_bias": list(dict(params.logit_bias)),
        }.items():
            if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"{name} holds token id {wrong}; ids are 0 to {limits.vocab_size - 1}")
        if len(set(params.bad_token_ids)) == limits.vocab_size or (allowed and not set(allowed) - set(params.bad_token_ids)):
            raise ValueError("bad_token_ids bans every token that could be drawn: leave some")
        if params.n != 1:
            raise ValueError(f"n is {params.n}: a request of the engine is one completion; add SamplingParams.copies() one by one")
        needed = len(prompt) + params.max_tokens
        if needed > limits.context_length:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({params.max_tokens}) are {needed} tokens together, more than the "
                f"context length of {limits.context_length}: shorten the prompt or lower max_tokens"
            )
        if needed > limits.num_pages * limits.page_size:
            raise ValueError(
                f"prompt and max_tokens are {needed} tokens together, more than the cache's {limits.num_pages} pages of "
                f"{limits.page_size} hold: lower max_tokens or raise num_pages"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model directory has none: use stop_token_ids")
