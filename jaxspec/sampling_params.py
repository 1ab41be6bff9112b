"""The sampling parameters of a request. Plain Python, no JAX.

Every parameter is declared once, here: its default, its check, its names in the requests of OpenAI's and SGLang's APIs, and its
option of `jaxspec generate`. The server's request classes and the command line are made from these declarations.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 12
"""With the model's end-of-sequence tokens these must fit spec.settings.MAX_STOP_TOKENS."""
MAX_LOGPROBS = 20
"""Most alternatives per token whose log probabilities are reported."""
MAX_N = 128
MAX_LOGIT_BIAS = 1024

type TokenBias = Mapping[int, float] | tuple[tuple[int, float], ...]


class Whole(NamedTuple):
    """A whole number from `least` to `most` (None: any)."""

    least: int
    most: int | None = None

    def clean(self, name: str, value: Any) -> int:
        """The value as an int. Raises ValueError, naming the parameter."""
        if not is_int(value) or value < self.least or (self.most is not None and value > self.most):
            limits = f">= {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise ValueError(f"{name} must be a whole number {limits}, got {short(value)}")
        return int(value)


class Number(NamedTuple):
    """A number from `least` to `most`; `above`: more than `least`."""

    least: float
    most: float
    above: bool = False

    def clean(self, name: str, value: Any) -> float:
        """The value as Python's number. Raises ValueError, naming the parameter."""
        if not is_number(value) or not self.least <= value <= self.most:
            raise ValueError(f"{name} must be a number between {self.least} and {self.most}, got {short(value)}")
        if self.above and value == self.least:
            raise ValueError(f"{name} must be above {self.least}, got {short(value)}")
        return value if isinstance(value, int | float) else float(value)


class Seed(NamedTuple):
    """A whole number of 64 bits, with or without sign."""

    def clean(self, name: str, value: Any) -> int:
        """The value as an int. Raises ValueError, naming the parameter."""
        if not is_int(value) or not -(2**63) <= value < 2**64:
            raise ValueError(f"{name} must be a 64-bit whole number, got {short(value)}")
        return int(value)


class Flag(NamedTuple):
    """True or False."""

    def clean(self, name: str, value: Any) -> bool:
        """The value. Raises ValueError, naming the parameter."""
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {short(value)}")
        return value


class StringList(NamedTuple):
    """One string or several, none of them empty."""

    most: int
    longest: int
    """Characters."""

    def clean(self, name: str, value: Any) -> tuple[str, ...]:
        """The strings as a tuple. Raises ValueError, naming the parameter."""
        strings = (value,) if isinstance(value, str) else value
        if not isinstance(strings, tuple | list) or not all(isinstance(string, str) for string in strings):
            raise ValueError(f"{name} must be a string or a list of strings, got {short(value)}")
        if any(not 0 < len(string) <= self.longest for string in strings) or len(strings) > self.most:
            raise ValueError(f"{name} takes up to {self.most} strings of 1 to {self.longest} characters")
        return tuple(strings)


class IdList(NamedTuple):
    """A list of token ids."""

    least: int = 0
    """The least number of ids."""
    most: int | None = None

    def clean(self, name: str, value: Any) -> tuple[int, ...]:
        """The ids as a tuple. Raises ValueError, naming the parameter."""
        if not isinstance(value, tuple | list) or not all(is_int(token) and token >= 0 for token in value):
            raise ValueError(f"{name} must be a list of token ids, got {short(value)}")
        if self.most is not None and len(value) > self.most:
            raise ValueError(f"{name} takes up to {self.most} ids, got {len(value)}")
        if len(value) < self.least:
            raise ValueError(f"{name} must not be empty: no token could be drawn; leave it out to allow all")
        return tuple(map(int, value))


class Biases(NamedTuple):
    """Numbers between -limit and limit by token id."""

    limit: float
    most: int

    def clean(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        """Pairs of token id and number. Raises ValueError, naming the parameter."""
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{name} must map token ids to numbers, got {short(value)}")
        if len(pairs) > self.most:
            raise ValueError(f"{name} takes up to {self.most} tokens, got {len(pairs)}")
        for token, bias in pairs:
            if not is_int(token) or token < 0 or not is_number(bias) or not -self.limit <= bias <= self.limit:
                raise ValueError(
                    f"{name} must map token ids to numbers between {-self.limit} and {self.limit}, got {short({token: bias})}"
                )
        return tuple((int(token), bias if isinstance(bias, int | float) else float(bias)) for token, bias in pairs)


type Check = Whole | Number | Seed | Flag | StringList | IdList | Biases


class Declaration(NamedTuple):
    """The declaration of a parameter, beside its default and its docstring."""

    check: Check
    openai: str | None
    """Its field in OpenAI's requests, vLLM's extras included. None: no field, or one per endpoint."""
    sglang: str | None
    """Its field in SGLang's `sampling_params`. None: no field."""
    cli: str | None
    """The value's name in `jaxspec generate --help`. None: no option."""


SAME = "="


def declared(
    check: Check, *, openai: str | None = SAME, sglang: str | None = SAME, cli: str | None = None
) -> dict[str, Declaration]:
    """The metadata of a field; SAME: the requests have the field's own name."""
    return {"declaration": Declaration(check, openai, sglang, cli)}


@dataclass(frozen=True)
class SamplingParams:
    """Raises ValueError, naming the field, for a value out of range.

    The next token is chosen in this order: penalties, logit_bias, bans (min_tokens, bad and allowed ids), temperature,
    then top_k, top_p and min_p together (a token must pass all three, each looking at the same probabilities), then the draw.
    """

    max_tokens: int = field(default=128, metadata=declared(Whole(1), openai=None, sglang="max_new_tokens", cli="N"))
    """Tokens to generate, at most."""
    temperature: float = field(default=1.0, metadata=declared(Number(0, 100), cli="T"))
    """0 is greedy; otherwise logits are divided by it before sampling."""
    top_k: int = field(default=-1, metadata=declared(Whole(-1), cli="K"))
    """Only the k likeliest tokens can be drawn; -1 or 0: all."""
    top_p: float = field(default=1.0, metadata=declared(Number(0, 1, above=True), cli="P"))
    """Only the likeliest tokens that together have this probability can be drawn."""
    min_p: float = field(default=0.0, metadata=declared(Number(0, 1), cli="P"))
    """Only tokens with at least this share of the likeliest token's probability can be drawn."""
    repetition_penalty: float = field(default=1.0, metadata=declared(Number(0, 10, above=True), cli="X"))
    """Logits of tokens in the prompt or output are divided by it if positive, else multiplied."""
    frequency_penalty: float = field(default=0.0, metadata=declared(Number(-2, 2), cli="X"))
    """Subtracted from a token's logit once for every time it occurs in the output."""
    presence_penalty: float = field(default=0.0, metadata=declared(Number(-2, 2), cli="X"))
    """Subtracted from a token's logit once if it occurs in the output."""
    logit_bias: TokenBias = field(default=(), metadata=declared(Biases(100, MAX_LOGIT_BIAS)))
    """Added to the logits of these tokens, by token id."""
    min_tokens: int = field(default=0, metadata=declared(Whole(0), sglang="min_new_tokens", cli="N"))
    """No stop token (end of sequence included) can be drawn, and no stop string ends the text, before this many tokens."""
    bad_token_ids: tuple[int, ...] | list[int] = field(default=(), metadata=declared(IdList(), openai=None, sglang=None))
    """Never drawn."""
    allowed_token_ids: tuple[int, ...] | list[int] | None = field(default=None, metadata=declared(IdList(1), sglang=None))
    """Only these can be drawn. None: all."""
    seed: int | None = field(default=None, metadata=declared(Seed(), sglang="sampling_seed", cli="N"))
    """The same seed gives the same text, with any tree or none. None: the engine draws one."""
    n: int = field(default=1, metadata=declared(Whole(1, MAX_N)))
    """Completions of the prompt. With a seed, completion i has the seed + i, modulo 2**64."""
    stop: str | tuple[str, ...] | list[str] = field(
        default=(), metadata=declared(StringList(MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH), cli="TEXT")
    )
    """Generation ends before the first of these strings; it is not part of the text (but see include_stop_str_in_output)."""
    stop_token_ids: tuple[int, ...] | list[int] = field(default=(), metadata=declared(IdList(0, MAX_STOP_TOKEN_IDS)))
    """Generation ends with the first of these tokens; it is part of token_ids but not of the text."""
    ignore_eos: bool = field(default=False, metadata=declared(Flag(), cli=""))
    """Continue after the model's end-of-sequence token."""
    skip_special_tokens: bool = field(default=True, metadata=declared(Flag()))
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = field(default=False, metadata=declared(Flag(), sglang="no_stop_trim"))
    """The text ends with the stop string or token that ended it. (vLLM's name; SGLang calls it no_stop_trim.)"""
    logprobs: int | None = field(default=None, metadata=declared(Whole(0, MAX_LOGPROBS), openai=None, sglang=None))
    """Report the log probability of every token and of this many likeliest ones (0: none beside it). They are the model's own:
    of the unchanged logits, before penalties, bias and temperature."""
    prompt_logprobs: int | None = field(default=None, metadata=declared(Whole(0, MAX_LOGPROBS), openai=None, sglang=None))
    """The same for the prompt's tokens; the prompt is then computed in full, without the prefix cache."""

    def __new__(cls, *_: object, **given: object):
        """Raises TypeError, with a hint, for a name that is not a parameter."""
        if problem := _unknown_names(given):
            raise TypeError(problem)
        return super().__new__(cls)

    def __post_init__(self):
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                object.__setattr__(self, each.name, declaration(each.name).check.clean(each.name, value))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})")
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001, got {self.temperature}")

    @classmethod
    def of(cls, value: "SamplingParams | Mapping[str, Any] | None") -> "SamplingParams":
        """Parameters, also from a mapping of them by name; None: the defaults.

        In:  {"max_tokens": 16, "temperature": 0}
        Out: SamplingParams(max_tokens=16, temperature=0)

        Raises:
            ValueError: `value` is neither, or has an unknown name or a value out of range; the message names it.
        """
        if isinstance(value, SamplingParams):
            return value
        if not isinstance(value, Mapping | None):
            raise ValueError(
                f"sampling_params must be SamplingParams or a mapping such as {{'max_tokens': 16}}, got {short(value)}"
            )
        if problem := _unknown_names(value or {}):
            raise ValueError(problem)
        return cls(**(value or {}))

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


def declaration(name: str) -> Declaration:
    """The declaration of a parameter."""
    found: Declaration = SamplingParams.__dataclass_fields__[name].metadata["declaration"]
    openai, sglang = (name if theirs == SAME else theirs for theirs in (found.openai, found.sglang))
    return found._replace(openai=openai, sglang=sglang)


def _unknown_names(given: Mapping[str, Any]) -> str | None:
    """The error for the first unknown name, with a suggestion; None if all names are known."""
    names = [each.name for each in fields(SamplingParams)]
    unknown = next((name for name in given if name not in names), None)
    if unknown is None:
        return None
    theirs = {declaration(name).sglang: name for name in names} | {"max_completion_tokens": "max_tokens"}
    close = difflib.get_close_matches(str(unknown), names, 1, 0.5)
    meant = theirs.get(unknown) or (close[0] if close else None)
    return f"SamplingParams has no {unknown!s:.80}: " + (f"did you mean {meant}?" if meant else f"it has {', '.join(names)}")


def is_int(value: Any) -> bool:
    """Whether it is a whole number, NumPy's included; bool, which Python counts as int, is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, NumPy's included."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def short(value: object) -> str:
    """A value as an error message shows it: never more than 80 characters of what a client sent."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
