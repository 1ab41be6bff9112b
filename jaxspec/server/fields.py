"""What request fields are made of: strict types, limits, and a way to refuse options by name.

No option is ever ignored: a field that we know but don't support yet takes only the value that changes nothing (`only`),
and a field that we don't know is refused.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

MAX_FIELDS = 100
"""Fields in one object; those that exist are fewer."""


def only(*neutral: Any) -> AfterValidator:
    """For an option that is not supported yet: null and these values, which ask for nothing, pass."""
    shown = " or ".join(["null", *(repr(value).lower() if isinstance(value, bool) else repr(value) for value in neutral)])

    def check(value: Any) -> Any:
        if value is None or any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral):
            return value
        raise PydanticCustomError("unsupported", "is not supported yet (leave it out or send {shown})", {"shown": shown})

    return AfterValidator(check)


def described_as(description: str) -> WrapValidator:
    """One message for a union of types, where pydantic would report a mismatch with every member."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValueError:
            raise PydanticCustomError("wrong_type", "Input should be {description}", {"description": description}) from None

    return WrapValidator(check)


type Strings = Annotated[list[str], FailFast()]
"""As with all lists here, the first wrong item ends the check: a body of millions of them must not cost millions of messages."""
type TokenIds = Annotated[list[int], FailFast()]
type ListsOfTokenIds = Annotated[list[TokenIds], FailFast()]
Prompt = Annotated[
    str | Strings | TokenIds | ListsOfTokenIds,
    described_as("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
StringOrStrings = Annotated[str | Strings | None, described_as("a string or a list of strings")]


class Strict(BaseModel):
    """No conversions ("5" is not 5) and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def limit_fields(cls, value: Any) -> Any:
        """Each unknown field costs a message, so there must not be millions."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "Input should be an object of at most {most} fields", {"most": MAX_FIELDS})
        return value
