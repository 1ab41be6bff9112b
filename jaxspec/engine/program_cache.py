"""Programs kept between runs: compiled ones in JAX's persistent cache, and traced ones next to them.

Tracing and lowering a program takes longer than loading its compiled code, so a process that finds the traced program skips both.
Traced programs are StableHLO in JAX's export format; nothing in them is Python code.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax
from jax import export

from jaxspec.cache_directory import cache_directory
from jaxspec.decoding.block_drafter import BlockState
from jaxspec.decoding.coupling import Calibration
from jaxspec.decoding.cycle import Proposal
from jaxspec.decoding.drafter import Memos, MergedState, Promises
from jaxspec.decoding.head_drafter import HeadState
from jaxspec.decoding.ngram import FirstGuess, NgramState, Rates
from jaxspec.decoding.prefill import Chunk
from jaxspec.decoding.programs import Proposed, Settlement
from jaxspec.decoding.sampling import Logprobs
from jaxspec.decoding.settings import Settings
from jaxspec.decoding.state import Admission, Drafted, Features, ProgramOutput, Sequences, State
from jaxspec.decoding.tree import Candidates, Chain, Tree
from jaxspec.typing import KeysValues
from pallas_kernels.cpu import TARGETS as CPU_KERNELS
from pallas_kernels.cpu import what_is_missing

for node in (
    Admission, BlockState, Calibration, Candidates, Chain, Chunk, Drafted, Features, FirstGuess, HeadState, KeysValues, Logprobs,
    Memos, MergedState, NgramState, ProgramOutput, Promises, Proposal, Proposed, Rates, Sequences, Settings, Settlement, State,
    Tree,
):  # fmt: skip
    export.register_namedtuple_serialization(node, serialized_name=f"jaxspec.{node.__name__}")

PACKAGES = ("jaxspec", "pallas_kernels")
"""The packages whose source a program depends on, except for APART."""
APART = ("server", "commands", "demo", "planner", "train")
"""The parts of PACKAGES that the engine does not import."""
LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
KERNELS = tuple(map(export.DisabledSafetyCheck.custom_call, ("__gpu$xla.gpu.triton", *CPU_KERNELS)))
"""JAX promises no compatibility of GPU kernels across versions. Skipping its check is safe, as each version has its own files."""
DIGEST_BYTES = 32
"""Bytes of the checksum at the start of a file, which shows damage."""
KEEP_DAYS = 30
"""Files that no process has used for this long are removed, as every change of the source gives all files new names."""

UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([\w.()-]+)'")
"""JAX's warning."""
HIT = "/jax/compilation_cache/cache_hits"
"""JAX's event for a program found in its persistent cache."""

logger = logging.getLogger(__name__)


def enable_compilation_cache() -> Path | None:
    """Turns JAX's persistent compilation cache on and returns its directory; None if it is off.

    The directory is JAX's own setting if there is one, else JAXSPEC_COMPILATION_CACHE, else one in cache_directory().
    JAXSPEC_COMPILATION_CACHE=off turns it off, and so does one that can't be made.
    """
    chosen = os.environ.get("JAXSPEC_COMPILATION_CACHE", "")
    if chosen.lower() == "off":
        return None
    if jax.config.jax_compilation_cache_dir is None:
        try:
            directory = Path(os.path.expanduser(chosen)) if chosen else cache_directory() / "programs"
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("compiled programs are not kept: %s; JAXSPEC_COMPILATION_CACHE names another directory", error)
            return None
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        remove_unused(directory, "*-cache")
    logger.info("compiled programs are kept in %s", jax.config.jax_compilation_cache_dir)
    return Path(jax.config.jax_compilation_cache_dir)


@contextlib.contextmanager
def removing_damaged() -> Iterator[None]:
    """Entries that JAX can't decompress are removed from its cache afterwards, so that the next process stores them again.

    JAX itself warns, compiles, and keeps the damaged file for ever. Other threads should not change warning filters meanwhile.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    directory, removed = jax.config.jax_compilation_cache_dir, set[str]()
    unread = [(warning, UNREADABLE.match(str(warning.message))) for warning in caught]
    for name in {found[1] for _, found in unread if found}:  # of a kind of programs: most are whole
        for file in filter(is_damaged, Path(directory).glob(f"{name}-*-cache")):
            with contextlib.suppress(OSError):  # we may not
                file.unlink()
                removed.add(name)
    if removed:
        logger.warning("removed damaged programs from %s: %s", directory, ", ".join(sorted(removed)))
    for warning, found in unread:
        if found is None or found[1] not in removed:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def is_damaged(file: Path) -> bool:
    """Whether JAX can't decompress this entry of its cache. False where its own function for that, which isn't public, is gone."""
    try:
        from jax._src.compilation_cache import decompress_executable
    except ImportError:
        return False
    try:
        decompress_executable(file.read_bytes())
    except OSError:  # it may be whole
        return False
    except Exception:  # several libraries raise their own kinds
        return True
    return False


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


def stored_traces(*made_for: object) -> "StoredTraces | None":
    """The traced programs next to the compiled ones; None if no disk keeps the latter. Call enable_compilation_cache first."""
    directory = trace_directory()
    return None if directory is None else StoredTraces(directory, repr((*made_for, what_is_missing())))


class StoredTraces:
    """A directory of traced programs. Their file names are hashes of all that they depend on: our source, the libraries' versions,
    JAX's settings and devices, the program's name and arguments, and `made_for`, everything else."""

    def __init__(self, directory: Path, made_for: str):
        self._directory, self._level = directory, logging.WARNING
        self._key = "\n".join((source_digest(), *map(_version, LIBRARIES), repr(jax.config.values), repr(jax.devices()), made_for))
        remove_unused(directory, "*.stablehlo", "tmp*")

    def get(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """The traced program, to be called inside jit: from the directory, else traced now and saved there.

        The function itself, if JAX can't store it or the directory can't be used.
        """
        leaves, structure = jax.tree.flatten(arguments)
        parts = (self._key, name, str(structure), *(f"{leaf.dtype} {leaf.shape}" for leaf in leaves))
        file = self._directory / f"{hashlib.sha256('\n'.join(parts).encode()).hexdigest()}.stablehlo"
        try:
            traced = _read(file)
            if traced is None:  # leaves go in one by one, as JAX stores no dictionaries that have numbers for keys
                flat = jax.jit(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)))
                traced = export.export(flat, disabled_checks=KERNELS)(*leaves)
                _write(file, traced.serialize())
        except Exception as error:  # any error: the program can always be traced
            logger.log(self._level, "traced programs are not kept, at least not %s: %.200s", name, error)
            self._level = logging.DEBUG  # once is enough
            return function

        @functools.wraps(function)  # profilers show its name
        def call_traced(*arguments):
            return traced.call(*jax.tree.leaves(arguments))

        return call_traced


def remove_unused(directory: Path, *patterns: str) -> None:
    """Removes files that were neither written nor read for KEEP_DAYS. (On a disk that records no reads: that were not written.)"""
    for file in (file for pattern in patterns for file in directory.glob(pattern)):
        with contextlib.suppress(OSError):  # another process was quicker, or we may not
            status = file.stat()
            if max(status.st_mtime, status.st_atime) < time.time() - KEEP_DAYS * 24 * 3600:
                file.unlink()


def source_digest(root: Path = Path(__file__).parents[2]) -> str:
    """A hash of the source code of PACKAGES without APART."""
    digest = hashlib.sha256()
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        if not set(APART) & set(file.relative_to(root).parts):
            digest.update(f"{file.relative_to(root)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(library: str) -> str:
    return f"{library} {importlib.metadata.version(library)}"


def _read(file: Path) -> export.Exported | None:
    """None if it is not there or damaged."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    if hashlib.sha256(content[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
        return None
    with contextlib.suppress(OSError):  # the directory is not ours
        os.utime(file)
    return export.deserialize(bytearray(content[DIGEST_BYTES:]))


def _write(file: Path, content: bytes | bytearray) -> None:
    """Other processes see the whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"tmp{uuid.uuid4().hex}")  # tempfile's could not be read by others who share the directory
    try:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
