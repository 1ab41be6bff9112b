"""Types of request fields: strict, with limits, and a way to refuse options by name.

No option is silently ignored: a known but unsupported field takes only values without effect (`Only`), and an unknown field is
refused.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from jaxspec.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N

MAX_INT = 2**31 - 1
"""The largest number of tokens, token id or priority, so that messages that quote one stay short."""
MAX_NAME = 128
"""Characters in the name of a request."""
MAX_ALLOWED_TOKENS = 2**18
MAX_FIELDS = 300
"""The most fields in one object; no endpoint has that many."""
MAX_TEMPLATE_OPTIONS = 16


class Only:
    """For an option that is not supported yet: allows null and these values, which have no effect."""

    def __init__(self, *neutral: Any):
        self._neutral = neutral
        self._shown = " or ".join(["null", *(repr(value).lower() if isinstance(value, bool) else repr(value) for value in neutral)])

    def _check(self, value: Any) -> Any:
        if value is None or any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self._neutral):
            return value
        raise PydanticCustomError("unsupported", f"is not supported yet (leave it out or send {self._shown})")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self._neutral], "description": "Not supported yet."}


def described_as(description: str) -> WrapValidator:
    """One message for a union of types; pydantic alone would report a mismatch with every member."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValueError:
            raise PydanticCustomError("wrong_type", f"Input should be {description}") from None

    return WrapValidator(check)


ONE, EACH = "<one>", "<each>"
"""What pydantic adds to the place of an error, after the field, for `one_or_each`. Messages leave it out."""
one_or_each = Discriminator(lambda value: EACH if isinstance(value, list) else ONE)
"""Tells an object, whose tag is ONE, from a list of them, whose tag is EACH."""
type Strings = Annotated[list[str], FailFast()]
"""The first wrong item ends the check, as in all lists here: millions of wrong items must not produce millions of messages."""
type TokenIds = Annotated[list[Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]], FailFast()]
type ListsOfTokenIds = Annotated[list[TokenIds], FailFast()]
Prompt = Annotated[
    str | Strings | TokenIds | ListsOfTokenIds,
    described_as("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
StringOrStrings = Annotated[str | Strings | None, described_as("a string or a list of strings")]
type Schema = Annotated[str | dict[str, Any], described_as("a JSON schema: an object or its text")]


def _logit_bias(value: Any) -> dict[int, float]:
    """JSON keys are strings. Checked by hand, so that the first wrong entry of a large object ends the check."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("logit_bias", f"Input should be an object of at most {MAX_LOGIT_BIAS} token ids and biases")
    for key, bias in value.items():
        is_id = len(key) <= 10 and key.isdecimal() and str(int(key)) == key
        is_bias = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not (is_id and is_bias):
            raise PydanticCustomError("logit_bias", "Input should be an object that maps token ids to numbers from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


type TokenCount = Annotated[int, Field(ge=1, le=MAX_INT)]
"""A number of tokens."""
type TokenCountOrZero = Annotated[int, Field(ge=0, le=MAX_INT)]
type Copies = Annotated[int, Field(ge=1, le=MAX_N)]
type LogitBias = Annotated[dict[int, float] | None, PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)]
type AllowedTokenIds = Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
type LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
type Priority = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
type CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
type RequestName = Annotated[str, Field(max_length=MAX_NAME, pattern="^[ -~]+$")]
"""Printable ASCII, as in the header x-request-id."""
type RequestNames = Annotated[list[RequestName], Field(min_length=1), FailFast()]
NameOrNames = Annotated[
    RequestName | RequestNames | None,
    described_as(f"a name of 1 to {MAX_NAME} printable ASCII characters, or a list of such names, one for each prompt"),
]


def _limit_template_options(value: Any) -> Any:
    """Refuses too many options before each is checked."""
    if isinstance(value, dict) and len(value) > MAX_TEMPLATE_OPTIONS:
        raise ValueError
    return value


type TemplateOption = bool | int | Annotated[float, Field(allow_inf_nan=False)] | Annotated[str, Field(max_length=200)]
type TemplateOptions = Annotated[
    dict[str, TemplateOption],
    Field(max_length=MAX_TEMPLATE_OPTIONS),
    BeforeValidator(_limit_template_options),
    described_as(f"an object of at most {MAX_TEMPLATE_OPTIONS} booleans, numbers and strings of at most 200 characters"),
]


class RequestModel(BaseModel):
    """A request schema without conversions ("5" is not 5) and without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def limit_fields(cls, value: Any) -> Any:
        """Bounds the number of messages about unknown fields."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", f"Input should be an object of at most {MAX_FIELDS} fields")
        return value


class KindedModel(RequestModel):
    """An object whose `type` says which fields it has. Fields that are null count as left out."""

    type: str
    """Each subclass lists its own."""
    needed: ClassVar[Mapping[str, str]]
    """By type: the names of the fields that it must have ..."""
    allowed: ClassVar[Mapping[str, str]]
    """... and of those that it may have."""

    @model_validator(mode="after")
    def check_kind(self) -> Self:
        """Refuses fields of another type, and a type without its fields."""
        kind = self.type
        given = {name for name in self.model_fields_set if getattr(self, name) is not None} - {"type"}
        needed = set(self.needed[kind].split())
        wrong = sorted(given - needed - set(self.allowed[kind].split())), sorted(needed - given)
        for names, said in zip(wrong, ("can't have", "needs"), strict=True):
            if names:
                raise PydanticCustomError("kind", f"of the type {kind} {said} {', '.join(names)}")
        return self


def adding[Model: RequestModel](fields: Mapping[str, Any]) -> Callable[[type[Model]], type[Model]]:
    """The decorator of a request model that has these fields too, given as pydantic's create_model takes them."""
    return lambda model: create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)
