"""How one request is sampled and when it ends. Plain Python: importing this loads no JAX."""

import math
from dataclasses import dataclass

MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 12
"""With the model's end-of-sequence tokens these must fit spec.state.MAX_STOP_TOKENS."""


@dataclass(frozen=True)
class SamplingParams:
    """Raises ValueError, naming the field, for a value out of range."""

    max_tokens: int = 128
    """Tokens to generate, at most; the first one that follows the prompt counts."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it before sampling."""
    seed: int | None = None
    """The same seed gives the same text, with any tree or none. None: the engine draws one."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Generation ends before the first of these strings; it is not part of the text."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Generation ends with the first of these tokens; it is part of token_ids but not of the text."""
    ignore_eos: bool = False
    """Keep going after the model's end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(string, str) for string in stop):
            raise ValueError(f"stop must be a string or a list of strings, got {short(self.stop)}")
        if any(not 0 < len(string) <= MAX_STOP_STRING_LENGTH for string in stop) or len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_STRING_LENGTH} characters")
        ids = self.stop_token_ids
        if not isinstance(ids, (tuple, list)) or not all(is_int(token) and token >= 0 for token in ids):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {short(ids)}")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids takes up to {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a whole number >= 1, got {short(self.max_tokens)}")
        temperature = self.temperature
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature <= 100:
            raise ValueError(f"temperature must be a number between 0 and 100, got {short(temperature)}")
        if 0 < temperature < 1e-4 or math.isnan(temperature):
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001, got {temperature}")
        if self.seed is not None and (not is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ValueError(f"seed must be a 64-bit whole number, got {short(self.seed)}")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {short(getattr(self, name))}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))


def is_int(value: object) -> bool:
    """True for whole numbers; bool, which Python counts as int, is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: object) -> str:
    """A value as an error message shows it: never more than 80 characters of what a client sent."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
