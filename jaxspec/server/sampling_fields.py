"""The sampling parameters that OpenAI's and SGLang's requests have in common."""

from collections.abc import Mapping
from typing import Annotated, Any

from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import refused
from jaxspec.server.fields import (
    Copies,
    LogitBias,
    MinP,
    Penalty,
    RepetitionPenalty,
    Strict,
    StringOrStrings,
    TokenIds,
    TopK,
    TopP,
    only,
)


class SamplingFields(Strict):
    """Null is the same as left out: the default of SamplingParams."""

    n: Copies | None = None
    """Completions of each prompt."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    """-1 or 0: all tokens."""
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias = None
    stop: StringOrStrings = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    """The text ends with the stop string or token that ended it."""

    # Not supported yet.
    stop_regex: Annotated[Any, only([])] = None


SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
"""What requests of both APIs and SamplingParams have by the same name."""
OPENAI_NAMES = {name: name for name in (*SAME_NAMES, "min_tokens", "seed", "allowed_token_ids", "include_stop_str_in_output")}
NATIVE_NAMES = {name: name for name in SAME_NAMES} | {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Names of SamplingParams, and those that clients of OpenAI's and SGLang's API use."""


def sampling_params(client_names: Mapping[str, str], **fields: Any) -> SamplingParams:
    """SamplingParams from the fields that were given (not None). Raises ApiError, in the client's words."""
    try:
        params = SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise refused(error, client_names) from None
    return params
