"""What the server's owner decided, as far as the HTTP application needs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerSettings:
    """Frozen: whoever reads it can rely on it for the server's life."""

    api_key: str | None = None
    """What clients must send as `Authorization: Bearer <key>`. None: nobody needs a key."""
    admin_api_key: str | None = None
    """Asked for by what only the owner may do (flush the cache, abort everything, see the settings). None: api_key."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""
    request_timeout: float | None = None
    """Seconds after which a request ends with status 504, wherever it is. None: never."""
    tokenizer_info: bool = True
    """/tokenizer_info answers; lm-eval's remote tokenizer needs it."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """The launch settings that /server_info shows, by SGLang's names; no keys and no secrets among them."""

    def __post_init__(self) -> None:
        if "" in (self.api_key, self.admin_api_key):
            raise ValueError("api_key and admin_api_key must not be empty: leave them out to ask for none")
