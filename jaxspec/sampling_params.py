"""The sampling parameters of a request. Plain Python, no JAX.

Every parameter is declared once, here: its default, its check, its names in the requests of OpenAI's and SGLang's APIs, and its
option of `jaxspec generate`. The server's request classes and the command line are made from these declarations.
"""

import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from jaxspec.checks import Biases, Check, Flag, IdList, JsonSchema, Number, Seed, StringList, Text, Whole, short

MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 12
"""With the model's end-of-sequence tokens these must fit decoding.settings.MAX_STOP_TOKENS."""
MAX_LOGPROBS = 20
"""Most alternatives per token whose log probabilities are reported."""
MAX_N = 128
LEAST_TEMPERATURE = 1e-4
"""Except 0, which is greedy."""
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR = 2**17
"""Characters of a schema, regular expression or grammar."""
MAX_CHOICES = 1000

CONSTRAINTS = ("json_schema", "regex", "grammar", "choice", "structural_tag")
"""The fields that constrain the text."""

type TokenBias = Mapping[int, float] | tuple[tuple[int, float], ...]


class Declaration(NamedTuple):
    """The declaration of a parameter, in addition to its default and its docstring."""

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

    json_schema: Any = field(default=None, metadata=declared(JsonSchema(MAX_GRAMMAR)))
    """The text is JSON that fits this schema: a mapping, its text, or a Pydantic model. {"type": "object"} is any JSON object. Only
    one of this and the next four can be given."""
    regex: str | None = field(default=None, metadata=declared(Text(MAX_GRAMMAR)))
    """The whole text matches this regular expression (Rust's syntax, without look-around)."""
    grammar: str | None = field(default=None, metadata=declared(Text(MAX_GRAMMAR), openai="ebnf", sglang="ebnf"))
    """The whole text follows this grammar, Lark's (from the rule `start`) or EBNF with ::= (from `root`)."""
    choice: tuple[str, ...] | list[str] | None = field(
        default=None, metadata=declared(StringList(MAX_CHOICES, MAX_STOP_STRING_LENGTH, 1), openai=None, sglang=None)
    )
    """The text is one of these strings."""
    structural_tag: Any = field(default=None, metadata=declared(JsonSchema(MAX_GRAMMAR, "a structural tag"), openai=None))
    """The text follows this description, xgrammar's, of tags with grammars between them and any text around them: a mapping with
    `format`, or with `structures` and `triggers`, or its text."""

    def __new__(cls, *_: object, **given: object):
        """Raises TypeError, with a hint, for a name that is not a parameter."""
        if problem := _unknown_names(given):
            raise TypeError(problem)
        return super().__new__(cls)

    def __post_init__(self):
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:  # defaults are right
                object.__setattr__(self, name, check.clean(name, value))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} can't be given together: a text follows one grammar")

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
        copies = [copy.copy(self) for _ in range(self.n)]  # which are right, and share their lists
        for index, each in enumerate(copies):
            object.__setattr__(each, "n", 1)
            object.__setattr__(each, "seed", None if self.seed is None else (self.seed + index) % 2**64)
        return copies

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The name of the field that constrains the text, and its value as text; None: nothing does."""
        name = next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)
        if name is None:
            return None
        value = getattr(self, name)
        return name, value if isinstance(value, str) else json.dumps(value)

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p excludes unlikely tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def adjusts(self) -> bool:
        """Whether logits are adjusted before temperature and filters apply."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalties or self.biases or self.min_tokens > 0

    @property
    def biases(self) -> bool:
        """Whether logit_bias, bad_token_ids or allowed_token_ids add a constant bias to the logits."""
        return bool(self.logit_bias or self.bad_token_ids or self.allowed_token_ids is not None)


_NAMES = frozenset(each.name for each in fields(SamplingParams))
_CHECKS = [(each.name, each.default, each.metadata["declaration"].check) for each in fields(SamplingParams)]


def declaration(name: str) -> Declaration:
    """The declaration of a parameter."""
    found: Declaration = SamplingParams.__dataclass_fields__[name].metadata["declaration"]
    openai, sglang = (name if theirs == SAME else theirs for theirs in (found.openai, found.sglang))
    return found._replace(openai=openai, sglang=sglang)


def _unknown_names(given: Mapping[str, Any]) -> str | None:
    """The error for the first unknown name, with a suggestion; None if all names are known."""
    if given.keys() <= _NAMES:
        return None
    names = [each.name for each in fields(SamplingParams)]
    unknown = next(name for name in given if name not in _NAMES)
    theirs = {declaration(name).sglang: name for name in names} | {"max_completion_tokens": "max_tokens"}
    close = difflib.get_close_matches(str(unknown), names, 1, 0.5)
    meant = theirs.get(unknown) or (close[0] if close else None)
    return f"SamplingParams has no {unknown!s:.80}: " + (f"did you mean {meant}?" if meant else f"it has {', '.join(names)}")
