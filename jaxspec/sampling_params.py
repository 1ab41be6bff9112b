"""How one request is sampled and when it ends. Plain Python: importing this loads no JAX."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 12
"""With the model's end-of-sequence tokens these must fit spec.state.MAX_STOP_TOKENS."""
MAX_LOGPROBS = 20
"""Most alternatives per token whose log probabilities are reported."""
MAX_N = 128
MAX_LOGIT_BIAS = 1024

type TokenBias = Mapping[int, float] | tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingParams:
    """Raises ValueError, naming the field, for a value out of range.

    The next token is chosen in this order: penalties, logit_bias, bans (min_tokens, bad and allowed ids), temperature,
    then top_k, top_p and min_p together (a token must pass all three, each looking at the same probabilities), then the draw.
    """

    max_tokens: int = 128
    """Tokens to generate, at most; the first one that follows the prompt counts."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it before sampling."""
    top_k: int = -1
    """Only the k likeliest tokens can be drawn; -1 or 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability can be drawn."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest token's probability can be drawn."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occur in prompt or output are divided by it if positive, else multiplied."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as it occurs in the output."""
    presence_penalty: float = 0.0
    """Taken from a token's logit once if it occurs in the output."""
    logit_bias: TokenBias = ()
    """Added to the logits of these tokens, by token id."""
    min_tokens: int = 0
    """No stop token (end of sequence included) can be drawn, and no stop string ends the text, before this many tokens."""
    bad_token_ids: tuple[int, ...] | list[int] = ()
    """Never drawn."""
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    """Only these can be drawn. None: all."""
    seed: int | None = None
    """The same seed gives the same text, with any tree or none. None: the engine draws one."""
    n: int = 1
    """Completions of the prompt. With a seed, completion i has the seed + i, modulo 2**64."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Generation ends before the first of these strings; it is not part of the text (but see include_stop_str_in_output)."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Generation ends with the first of these tokens; it is part of token_ids but not of the text."""
    ignore_eos: bool = False
    """Keep going after the model's end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """The text ends with the stop string or token that ended it. (vLLM's name; SGLang calls it no_stop_trim.)"""
    logprobs: int | None = None
    """Report the log probability of every token and of this many likeliest ones (0: none beside it). They are the model's own:
    of the unchanged logits, before penalties, bias and temperature."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; the prompt is then computed in full, without the prefix cache."""

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(string, str) for string in stop):
            raise ValueError(f"stop must be a string or a list of strings, got {short(self.stop)}")
        if any(not 0 < len(string) <= MAX_STOP_STRING_LENGTH for string in stop) or len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_STRING_LENGTH} characters")
        object.__setattr__(self, "stop", tuple(stop))
        for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids takes up to {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must not be empty: no token could be drawn; leave it out to allow all")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})")
        _whole("n", self.n, 1, MAX_N)
        _whole("top_k", self.top_k, -1)
        for name, low, high in _RANGES:
            _number(name, getattr(self, name), low, high)
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001, got {self.temperature}")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0, got 0")
        if self.seed is not None and (not is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ValueError(f"seed must be a 64-bit whole number, got {short(self.seed)}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {short(getattr(self, name))}")

    def copies(self) -> list["SamplingParams"]:
        """The parameters of each of the n completions.

        In:  SamplingParams(n=2, seed=7)
        Out: [SamplingParams(seed=7), SamplingParams(seed=8)]
        """
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + index) % 2**64 for index in range(self.n)]
        return [dataclasses.replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def filters(self) -> bool:
        """Some tokens can't be drawn because they are unlikely."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def adjusts(self) -> bool:
        """The logits are changed before temperature and filters look at them."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalties or self.biases or self.min_tokens > 0

    @property
    def biases(self) -> bool:
        """Something is added to the logits that stays the same for the whole text."""
        return bool(self.logit_bias or self.bad_token_ids or self.allowed_token_ids is not None)


_RANGES = (
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 10),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
)


def is_int(value: object) -> bool:
    """True for whole numbers; bool, which Python counts as int, is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for finite numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def short(value: object) -> str:
    """A value as an error message shows it: never more than 80 characters of what a client sent."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {limits}, got {short(value)}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number between {low} and {high}, got {short(value)}")


def _token_ids(name: str, ids: object) -> tuple[int, ...] | None:
    if ids is None and name == "allowed_token_ids":
        return None
    if not isinstance(ids, (tuple, list)) or not all(is_int(token) and token >= 0 for token in ids):
        raise ValueError(f"{name} must be a list of token ids, got {short(ids)}")
    return tuple(ids)


def _bias(bias: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"logit_bias must map token ids to numbers, got {short(bias)}")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias takes up to {MAX_LOGIT_BIAS} tokens, got {len(pairs)}")
    for token, value in pairs:
        if not is_int(token) or token < 0 or not is_number(value) or not -100 <= value <= 100:
            raise ValueError(f"logit_bias must map token ids to numbers between -100 and 100, got {short({token: value})}")
    return pairs
