"""Where compiled programs are kept between runs."""

import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Self

import jax

logger = logging.getLogger(__name__)

HIT = "/jax/compilation_cache/cache_hits"
"""What JAX calls it when it finds a program in its cache."""


def enable_compilation_cache() -> Path | None:
    """Turns JAX's persistent compilation cache on and returns its directory; None if it is off.

    The directory is JAX's own setting if there is one, else JAXSPEC_COMPILATION_CACHE, else ~/.cache/jaxspec/programs.
    JAXSPEC_COMPILATION_CACHE=off turns it off.
    """
    chosen = os.environ.get("JAXSPEC_COMPILATION_CACHE", "")
    if chosen.lower() == "off":
        return None
    if jax.config.jax_compilation_cache_dir is None:
        directory = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "jaxspec" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    logger.info("compiled programs are kept in %s", jax.config.jax_compilation_cache_dir)
    return Path(jax.config.jax_compilation_cache_dir)


def trace_directory() -> Path | None:
    """Where traced programs are kept: in the directory of compiled ones, if that is on this machine's disk."""
    directory = jax.config.jax_compilation_cache_dir
    return None if directory is None or "://" in directory else Path(directory) / "traces"


class CacheHits:
    """Counts the programs that JAX finds in its persistent cache, by thread, while the `with` block runs."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __enter__(self) -> Self:
        jax.monitoring.register_event_listener(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._take)

    @property
    def in_this_thread(self) -> int:
        """Hits of programs that this thread compiled."""
        return self._counts[threading.get_ident()]

    def _take(self, event: str, **_: str | int) -> None:
        if event == HIT:
            self._counts[threading.get_ident()] += 1
