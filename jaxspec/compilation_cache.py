"""Where compiled programs are kept between runs."""

import logging
import os
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


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
