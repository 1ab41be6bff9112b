"""vLLM's --speculative-config, in this server's own words."""

import json
from typing import Any, NamedTuple

from jaxspec.config import SpecConfig

METHODS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
"""vLLM's names and SGLang's."""
ONE_DEVICE = "draft_tensor_parallel_size"
KEYS = ("method", "model", "num_speculative_tokens", ONE_DEVICE)
FLAG = "--speculative-config"


class SpeculativeConfig(NamedTuple):
    """What the JSON says."""

    algorithm: str | None
    draft: str | None
    spec: SpecConfig
    """A chain: vLLM drafts no trees."""


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The JSON, checked. Raises ValueError, naming the key.

    In:  '{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}'
    Out: algorithm "EAGLE3", draft "head", spec 3/1/4
    """
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{FLAG} must be JSON, got {text[:80]!r}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{FLAG} must be a JSON object, got {text[:80]!r}")
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ValueError(f"{FLAG} has {unknown[0][:80]!r}, which is not supported; there is: {', '.join(KEYS)}")
    if given.get(ONE_DEVICE) not in (None, 1):
        raise ValueError(f"{FLAG}: {ONE_DEVICE} must be 1, got {given[ONE_DEVICE]!r:.80}")
    method, draft = (_text(given, key) for key in ("method", "model"))
    if method is not None and method not in METHODS:
        raise ValueError(f"{FLAG}: method must be one of {', '.join(METHODS)}, got {method[:80]!r}")
    steps = given.get("num_speculative_tokens")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"{FLAG}: num_speculative_tokens must be a whole number >= 1, got {steps!r:.80}")
    return SpeculativeConfig(None if method is None else METHODS[method], draft, SpecConfig(steps, 1))


def _text(given: dict[str, Any], key: str) -> str | None:
    value = given.get(key)
    if not isinstance(value, str | None):
        raise ValueError(f"{FLAG}: {key} must be a string, got {value!r:.80}")
    return value
