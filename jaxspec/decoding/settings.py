"""SamplingParams on the device: one row of settings per running request."""

from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.sampling_params import SamplingParams
from jaxspec.typing import Array, Bool, Float, Int, UInt

MAX_STOP_TOKENS = 16
"""Stop tokens per request that the device checks, end-of-sequence tokens included."""


class SamplingKind(IntEnum):
    """The steps that a request's sampling needs. A batch runs the steps of its highest kind, in which requests of lower kinds
    get the same tokens as alone."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2
    """With top_k, top_p or min_p."""
    ADJUSTED = 3
    """With penalties, bias, min_tokens, bad or allowed tokens, or a mask, and perhaps filters."""

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingKind":
        if params.adjusts:
            return cls.ADJUSTED
        return cls.FILTERED if params.filters else cls.TEMPERATURE if params.temperature > 0 else cls.GREEDY


def neutral(value: Any, dtype: DTypeLike) -> Any:
    """Declares a field of Settings: its value for greedy decoding without any extras, and its dtype."""
    return np.asarray(value, dtype)


class Settings(NamedTuple):
    """SamplingParams of r sequences, as the device holds them. This is the one declaration of each field.

    The defaults are one row with neutral values: greedy decoding without stop tokens. `settings_row` and `neutral_settings`
    take dtypes and shapes from them. A field with the name of a SamplingParams field gets its value, unless
    engine/inputs.py computes another.
    """

    kind: Int[Array, " r"] = neutral(SamplingKind.GREEDY, np.int32)
    """A SamplingKind."""
    temperature: Float[Array, " r"] = neutral(0, np.float32)
    """0: greedy."""
    seed: UInt[Array, "r 2"] = neutral((0, 0), np.uint32)
    """A 64-bit number: the high word, then the low one."""
    top_k: Int[Array, " r"] = neutral(np.iinfo(np.int32).max, np.int32)
    """The vocabulary size or more: all tokens."""
    top_p: Float[Array, " r"] = neutral(1, np.float32)
    min_p: Float[Array, " r"] = neutral(0, np.float32)
    repetition_penalty: Float[Array, " r"] = neutral(1, np.float32)
    frequency_penalty: Float[Array, " r"] = neutral(0, np.float32)
    presence_penalty: Float[Array, " r"] = neutral(0, np.float32)
    prompt_length: Int[Array, " r"] = neutral(0, np.int32)
    """The output begins here; frequency and presence penalties count the output only."""
    min_length: Int[Array, " r"] = neutral(0, np.int32)
    """Stop tokens are banned at positions below it."""
    stop_tokens: Int[Array, "r stops"] = neutral([-1] * MAX_STOP_TOKENS, np.int32)
    """Token ids that end the sequence; unused entries are -1."""
    wants_logprobs: Bool[Array, " r"] = neutral(False, np.bool_)
    masked: Bool[Array, " r"] = neutral(False, np.bool_)
    """Programs emit one token, which is among State.masks: what may follow drafts is not known."""


def packed(settings: Settings) -> Int[Array, "r words"]:
    """All fields of each row side by side, as 32-bit words: a GPU gathers them in one launch, not in one for each field."""
    of_rows = [field.reshape(len(field), -1) for field in settings]
    words = [
        field.astype(jnp.int32) if field.dtype == bool else jax.lax.bitcast_convert_type(field, jnp.int32) for field in of_rows
    ]
    return jnp.concatenate(words, 1)


def unpacked(words: Int[Array, "r words"]) -> Settings:
    """The inverse of `packed`."""
    fields, first = [], 0
    for default in Settings():
        part = words[:, first : first + default.size].reshape(len(words), *default.shape)
        fields.append(part > 0 if default.dtype == bool else jax.lax.bitcast_convert_type(part, default.dtype))
        first += default.size
    return Settings(*fields)


def highest_kind(settings: Settings, active: Bool[Array, " r"]) -> Int[Array, ""]:
    """The highest SamplingKind among the active rows; masks are adjustments."""
    kinds = jnp.where(settings.masked, SamplingKind.ADJUSTED, settings.kind)
    return jnp.max(jnp.where(active, kinds, SamplingKind.GREEDY))


def divisor(settings: Settings) -> Float[Array, "b 1 1"]:
    """The divisor of the logits: the temperature, or 1 for greedy requests."""
    return jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None, None]


def neutral_settings(rows: int) -> Settings:
    """Greedy decoding without stop tokens, in every row. Each field is a separate array, because they are donated."""
    return jax.tree.map(lambda value: jnp.tile(value, (rows, *(1,) * value.ndim)), Settings())


def settings_row(**values: Any) -> Settings:
    """One row of NumPy arrays with these values; other fields are neutral, and short lists are padded with neutral entries.

    In:  temperature=0.5, stop_tokens=[7]
    Out: temperature [0.5], stop_tokens [[7, -1, -1, ...]], top_p [1.0], ...
    """
    fields = Settings()._asdict()
    for name, value in values.items():
        default = fields[name]
        field, given = np.atleast_1d(default).copy(), np.atleast_1d(np.asarray(value, default.dtype))
        field[: len(given)] = given
        fields[name] = field.reshape(default.shape)
    return Settings(**{name: field[None] for name, field in fields.items()})
