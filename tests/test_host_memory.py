"""What a process may still take of the host's memory, on machines of files."""

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.host_memory import VERSIONS, GroupFiles, available_memory, own_memory

SIZES = st.integers(0, 2**40)


class Group(NamedTuple):
    """A control group's memory in bytes."""

    limit: int | None
    used: int
    files: int
    """Cached files among what is used that were read once."""
    active: int = 0
    """And those that were read again."""

    @property
    def left(self) -> int:
        return 2**62 if self.limit is None else max(0, self.limit - self.used + self.files + self.active)


GROUPS = st.lists(st.builds(Group, st.none() | SIZES, SIZES, SIZES, SIZES), max_size=3)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, kilobytes: int, version: int, groups: list[Group], path: str = "/a/b") -> Path:
    """A machine with this memory available and this process in the last of these groups, each of which is in the one before."""
    files: GroupFiles = VERSIONS[version]
    write(root / "proc/meminfo", f"MemTotal:       99999999 kB\nMemFree: 7 kB\nMemAvailable:   {kilobytes} kB\n")
    line = f"0::{path}" if version == 2 else f"3:cpu,cpuacct:/other\n4:hugetlb,memory:{path}\n0::/"
    write(root / "proc/self/cgroup", line + "\n")
    directory = root / files.groups
    for group, name in zip(groups, ("", "a", "b"), strict=False):
        directory = directory / name
        unlimited = "max" if version == 2 else str(2**63 - 4096)
        write(directory / files.limit, f"{unlimited if group.limit is None else group.limit}\n")
        write(directory / files.used, f"{group.used}\n")
        prefix = "" if version == 2 else "total_"  # in version 1 the others are of this group alone
        cached = f"{prefix}inactive_file {group.files}\n{prefix}active_file {group.active}\n"
        write(directory / "memory.stat", f"anon 5\n{cached}other_active_file 7\n{prefix}active_file_more 3\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
@given(kilobytes=st.integers(0, 2**30), groups=GROUPS)
def test_what_is_left_in_the_smallest_group_counts(tmp_path_factory, version, kilobytes, groups):
    root = machine(tmp_path_factory.mktemp("machine"), kilobytes, version, groups)
    assert available_memory(root) == min(1024 * kilobytes, *(group.left for group in groups), 2**62)


@pytest.mark.parametrize("version", [1, 2])
def test_groups_that_a_container_does_not_see(tmp_path, version):
    """It may see its own group as the one that holds all, under a path that only its host has, or one outside."""
    for path in ("/", "/docker/0123", "/../outside"):
        assert available_memory(machine(tmp_path, 10**6, version, [Group(2 * 10**8, 10**8, 10**7)], path)) == 11 * 10**7


def test_a_limit_that_can_not_be_read_is_none(tmp_path):
    machine(tmp_path, 1000, 2, [Group(10, 0, 0)])
    (tmp_path / "sys/fs/cgroup/memory.current").unlink()
    assert available_memory(tmp_path) == 1_024_000
    assert available_memory(tmp_path / "nothing") > 10**6, "as much as the system has, if that is all it tells"


def test_own_memory_grows_with_what_is_written(tmp_path):
    write(tmp_path / "proc/self/status", "VmRSS:\t  900 kB\nRssAnon:\t  500 kB\nRssFile:\t  400 kB\n")
    assert own_memory(tmp_path) == 512_000 and own_memory(tmp_path / "nothing") == 0
    before = own_memory()
    if before:  # Linux
        written = bytearray(b"1") * (1 << 26)
        assert own_memory() - before > len(written) * 0.9
