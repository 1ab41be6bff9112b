"""Where jaxspec keeps what it can make again: compiled programs, and GGUF models. Plain Python, no JAX."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """~/.cache/jaxspec, or jaxspec in the directory that XDG_CACHE_HOME names, if its path is absolute
    (https://specifications.freedesktop.org/basedir-spec/latest)."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "jaxspec"
