"""The settings that the HTTP application needs."""

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANY = "*"


def origins(text: str) -> tuple[str, ...]:
    """An option's type: origins of web pages, by commas or as a JSON list (vLLM's way).

    In:  "https://chat.example,http://localhost:3000" or '["https://chat.example", "http://localhost:3000"]'
    Out: ("https://chat.example", "http://localhost:3000")
    """
    try:
        given = json.loads(text) if text.startswith("[") else re.split(r"[,\s]+", text.strip())
    except ValueError:
        given = [text]
    for each in given:
        if each != ANY and not re.fullmatch(r"null|[a-z][a-z0-9+.-]{0,30}://[A-Za-z0-9.\[\]:_-]{1,200}", str(each)):
            raise ArgumentTypeError(
                "must be origins without a path, such as https://chat.example, http://localhost:3000 or app://obsidian.md, "
                f"or *, got {each!r:.100}"
            )
    return tuple(given)


def seconds(text: str) -> float:
    """An option's type: a time from 0 to a day."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 24 * 3600:
        raise ArgumentTypeError(f"must be a number of seconds from 0 to 86400, got {text[:80]!r}")
    return value


def positive_seconds(text: str) -> float:
    """An option's type: a time above 0."""
    if value := seconds(text):
        return value
    raise ArgumentTypeError("must be above 0")


@dataclass(frozen=True)
class ServerSettings:
    """Immutable for the lifetime of the server."""

    api_key: str | None = None
    """The key that clients must send as `Authorization: Bearer <key>`. None: no key is needed."""
    admin_api_key: str | None = None
    """The key for the owner's endpoints: flush the cache, abort everything, see the settings. None: api_key."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM; a second signal ends them at once."""
    request_timeout: float | None = None
    """Seconds after which a request, waiting included, ends with status 504, not before its grammar is compiled. None: never."""
    allowed_origins: tuple[str, ...] = ()
    """Other sites whose scripts may call the server: their origins, by commas, or * for all. None: only its own."""
    strict_model_name: bool = False
    """Whether requests for a model of another name are refused."""
    tokenizer_info: bool = True
    """Whether /tokenizer_info answers; lm-eval's remote tokenizer needs it."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """The launch settings that /server_info shows, by SGLang's names, without secrets."""

    def __post_init__(self) -> None:
        if "" in (self.api_key, self.admin_api_key):
            raise ValueError("api_key and admin_api_key must not be empty: leave them out to ask for none")
