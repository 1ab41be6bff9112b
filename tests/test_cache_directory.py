"""Where jaxspec keeps what it can make again."""

import pwd
from pathlib import Path

import pytest

from jaxspec.cache_directory import cache_directory
from jaxspec.commands.collect_env import compilation_cache


@pytest.mark.parametrize(
    ("given", "found"), [(None, "/home/me/.cache"), ("", "/home/me/.cache"), ("a/b", "/home/me/.cache"), ("/tmp/x", "/tmp/x")]
)
def test_it_is_where_the_environment_says(monkeypatch, given, found):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_directory() == Path(found) / "jaxspec"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(FileNotFoundError, match="set XDG_CACHE_HOME"):
        cache_directory()
    assert compilation_cache()["directory"]
