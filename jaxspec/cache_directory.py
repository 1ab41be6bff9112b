"""Where jaxspec keeps what it can make again: compiled programs, and GGUF models. Plain Python, no JAX."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """~/.cache/jaxspec, or jaxspec in the directory that XDG_CACHE_HOME names, if its path is absolute
    (https://specifications.freedesktop.org/basedir-spec/latest). Raises FileNotFoundError for a user without a home, as containers
    may have."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    directory = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"))
    if not directory.is_absolute():
        raise FileNotFoundError("this user has no home directory: set XDG_CACHE_HOME to where files may be kept")
    return directory / "jaxspec"
