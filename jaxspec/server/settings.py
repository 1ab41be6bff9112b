"""The settings that the HTTP application needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """Seconds after which a request, waiting included, ends with status 504. None: never."""
    strict_model_name: bool = False
    """Whether requests for a model of another name are refused."""
    tokenizer_info: bool = True
    """Whether /tokenizer_info answers; lm-eval's remote tokenizer needs it."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """The launch settings that /server_info shows, by SGLang's names, without secrets."""

    def __post_init__(self) -> None:
        if "" in (self.api_key, self.admin_api_key):
            raise ValueError("api_key and admin_api_key must not be empty: leave them out to ask for none")
