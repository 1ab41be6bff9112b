"""The host's memory: how much of it this process may still take, and arrays in it. Plain Python, no JAX.

The system tells what is free or can be freed at once; a container or a service may have less. Limits are those of control groups
(https://docs.kernel.org/admin-guide/cgroup-v2.html#memory), of version 2 or 1, and each holds for all groups below.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path("/")
ALIGNMENT = 64
"""Bytes."""


class GroupFiles(NamedTuple):
    """The names of a control group's files, in one version, and where its groups are."""

    groups: str
    """The directory of all groups."""
    limit: str
    used: str
    reclaimable: tuple[str, ...]
    """The entries of memory.stat with cached files. They are part of `used`, and freed when memory is needed, as MemAvailable has
    it: also those that were read more than once, such as the weights that an earlier process mapped."""


VERSIONS = {
    2: GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    1: GroupFiles(
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process may take: what the system has available, or less if a control group has less.

    `root` is the directory that holds /proc and /sys. A system without /proc/meminfo, such as macOS, counts with all its memory.
    """
    system = number(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB")
    left = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if system is None else 1024 * system]
    left += [each for group, files in groups(root) if (each := left_in(group, files)) is not None]
    return max(0, min(left))


def own_memory(root: Path = ROOT) -> int:
    """Bytes in use by this process alone, without mapped files, which count as available; 0 if the system does not tell."""
    return 1024 * (number(root / "proc/self/status", r"RssAnon:\s+(\d+) kB") or 0)


def groups(root: Path) -> Iterator[tuple[Path, GroupFiles]]:
    """The directories of this process's control groups for memory, from its own up to the one that holds all. Some may be missing:
    a container may see its own group as the one that holds all.

    In:  /proc/self/cgroup with 0::/a/b
    Out: sys/fs/cgroup/a/b, sys/fs/cgroup/a, sys/fs/cgroup
    """
    for line in contents(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        files = VERSIONS[2] if hierarchy == "0" else VERSIONS[1]
        if files is VERSIONS[2] or "memory" in controllers.split(","):
            own = root / files.groups / path.strip("/")
            yield from ((each, files) for each in (own, *own.parents) if each.is_relative_to(root / files.groups))


def left_in(group: Path, files: GroupFiles) -> int | None:
    """Bytes that a control group may still take, negative if it has more than its limit; None: it has no limit."""
    limit, used = number(group / files.limit, r"(\d+)"), number(group / files.used, r"(\d+)")
    if limit is None or used is None:  # "max", or no such group here
        return None
    return limit - used + sum(number(group / "memory.stat", rf"{entry} (\d+)") or 0 for entry in files.reclaimable)


def number(path: Path, line: str) -> int | None:
    """The number in the line of a file that this expression describes; None: it has no such line."""
    found = re.search(f"^{line}$", contents(path), re.MULTILINE)
    return int(found[1]) if found else None


def contents(path: Path) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that jax.device_put takes over on a CPU instead of copying it: those start at a multiple of ALIGNMENT."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def own_copy(array: np.ndarray) -> np.ndarray:
    """The array, copied if it views a mapped file (which may be replaced meanwhile) or is not aligned."""
    if array.flags.writeable and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
