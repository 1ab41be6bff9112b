"""The sampling parameters of OpenAI's and SGLang's requests, made from the declarations of SamplingParams."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jaxspec.checks import Biases, Check, Flag, IdList, JsonSchema, Number, Seed, StringList, Text, Whole, docstrings
from jaxspec.sampling_params import LEAST_TEMPERATURE, SamplingParams, declaration
from jaxspec.server.errors import refused
from jaxspec.server.fields import MAX_INT, AllowedTokenIds, LogitBias, RequestModel, Schema, StringOrStrings, TokenIds, adding

OPENAI_NAMES = {name: theirs for name in SamplingParams.__dataclass_fields__ if (theirs := declaration(name).openai)}
SGLANG_NAMES = {name: theirs for name in SamplingParams.__dataclass_fields__ if (theirs := declaration(name).sglang)}
"""Names of SamplingParams, and those of the fields in OpenAI's and SGLang's requests."""


def accepted_type(check: Check) -> Any:
    """The type of a request's field that holds such a parameter."""
    match check:
        case Whole(least, most):
            return Annotated[int, Field(ge=least, le=MAX_INT if most is None else most)]
        case Number(least, most, above):
            return Annotated[float, Field(gt=least if above else None, ge=None if above else least, le=most, allow_inf_nan=False)]
        case Seed():
            return int
        case Flag():
            return bool
        case StringList():
            return StringOrStrings
        case IdList(least):
            return AllowedTokenIds if least else TokenIds
        case Biases():
            return LogitBias
        case JsonSchema():
            return Schema
        case Text(longest):
            return Annotated[str, Field(max_length=longest)]


def fields_of(names: Mapping[str, str]) -> dict[str, Any]:
    """Fields for pydantic's create_model, by the clients' names. Null is the same as left out."""
    described = docstrings(SamplingParams)
    return {
        theirs: (accepted_type(declaration(name).check) | None, Field(default=None, description=described[name]))
        for name, theirs in names.items()
    }


class SamplingFields(RequestModel):
    """The parameters are added at run time."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@adding(fields_of(OPENAI_NAMES))
class OpenAISamplingFields(SamplingFields): ...


@adding(fields_of(SGLANG_NAMES))
class SglangSamplingFields(SamplingFields): ...


def sampling_params(client_names: Mapping[str, str], **fields: Any) -> SamplingParams:
    """SamplingParams from the fields that were given (not None). Temperatures too small to divide by are greedy, as SGLang has it.
    Raises ApiError, in the client's words."""
    if 0 < (fields.get("temperature") or 0) < LEAST_TEMPERATURE:
        fields["temperature"] = 0.0
    try:
        return SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise refused(error, client_names) from None
